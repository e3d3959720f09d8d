"""What every section of the configuration is made of."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|mps|(cuda|xpu)(:\d+)?)$")]


class ImpossibleError(ValueError):
    """Settings that are valid one by one and cannot work together.

    `problems` holds one `(dotted key within the section, reason)` per combination.
    """

    def __init__(self, problems: Iterable[tuple[str, str]]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{key}: {reason}" for key, reason in self.problems))


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants"
    )
