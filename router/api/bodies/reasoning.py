"""Body fields that hide a model's reasoning in the answer or bound its tokens."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field, StrictBool

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.sampling import MAX_COUNT
from kvferry.router.api.bodies.fields import Integer
from kvferry.router.api.bodies.output_grammar import BUDGET, limits_reasoning
from kvferry.router.text.text_model import TextModel


class ReasoningFields(BaseModel):
    """Fields that show or hide the reasoning, and bound its tokens."""

    include_reasoning: StrictBool | None = True
    thinking_token_budget: Annotated[Integer, Field(ge=0, le=MAX_COUNT)] | None = None

    def reasoning_budget(self, text: TextModel) -> int | None:
        """Return the maximum tokens of reasoning, or None; raise InvalidRequest if no token ends this model's."""
        budget = self.thinking_token_budget
        if budget is not None and not limits_reasoning(text):
            raise InvalidRequest(
                f"{BUDGET}: the model {text.name!r} writes no reasoning that ends with a token of its vocabulary",
                param=BUDGET,
            )
        return budget
