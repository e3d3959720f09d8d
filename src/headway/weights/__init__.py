"""Weight channels: how a published version travels from the trainer to the engines."""
