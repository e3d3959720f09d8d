"""A character-level tokenizer: one token per printable ASCII character, newline included."""

from pathlib import Path
from typing import Any

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SPECIAL = (PAD, EOS, UNKNOWN)
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
VOCABULARY = {token: index for index, token in enumerate((*SPECIAL, *ALPHABET))}
"""Token to id; the special ones come first. Any other character becomes `<unk>`."""

PAD_ID, EOS_ID = VOCABULARY[PAD], VOCABULARY[EOS]


def character_tokenizer() -> Any:
    """The tokenizer, as the `tokenizers` library has it.

    Example:
        >>> character_tokenizer().encode("1+2=").tokens
        ['1', '+', '2', '=']
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel(vocab=VOCABULARY, unk_token=UNKNOWN))
    # `.` alone would not match the newline.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write an ordinary Hugging Face tokenizer folder. Raises OSError."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=character_tokenizer(),
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.save_pretrained(folder)
