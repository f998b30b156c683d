"""Values that we make ourselves, without judging them again.

Doors validate. What a core builds from validated values is right by construction, and validating it once more
is most of what it costs. `trusted` makes the same value as validation would: a test runs whole simulations with
`trusted` replaced by the model's own validation, and every byte of the ledger must be the same.
"""

from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)

_new = object.__new__
_set_fields = BaseModel.__dict__["__dict__"].__set__
_set_names = BaseModel.__dict__["__pydantic_fields_set__"].__set__
_set_extra = BaseModel.__dict__["__pydantic_extra__"].__set__
_set_private = BaseModel.__dict__["__pydantic_private__"].__set__


def trusted(model: type[Model], /, **fields: Any) -> Model:
    """A value of this model. `fields`: every field, in the model's order, of its very type and in its range."""
    value = _new(model)
    _set_fields(value, fields)
    _set_names(value, _names(model))
    _set_extra(value, None)
    _set_private(value, None)
    return value


@cache
def _names(model: type[BaseModel]) -> set[str]:
    return set(model.model_fields)
