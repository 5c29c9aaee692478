"""Models: our own decoder of the Llama family, and transformers' models behind the same seam."""

from kvferry.engine.models.loader import load_model

__all__ = ["load_model"]
