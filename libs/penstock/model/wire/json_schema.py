"""JSON Schema 2020-12 of a struct, derived from its form."""

from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from penstock.model.nouns.types import Value
from penstock.model.schema.validation import form
from penstock.model.wire.codec import as_written


class Generator(GenerateJsonSchema):
    """Writes a default that is a struct as the codec does."""

    def encode_default(self, dft: Any) -> Any:
        return as_written(dft) if isinstance(dft, Value) else super().encode_default(dft)


def json_schema(kind: type[Value], ref_template: str = "#/$defs/{model}") -> dict[str, Any]:
    """The schema of values that `penstock.model.schema.validation.checked_json` accepts. `ref_template`: of
    nested structs."""
    return form(kind).model_json_schema(schema_generator=Generator, ref_template=ref_template)
