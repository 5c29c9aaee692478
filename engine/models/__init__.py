"""Models: kvferry's own decoders, and transformers' models behind the same interface."""

from kvferry.engine.models.loader import load_model

__all__ = ["load_model"]
