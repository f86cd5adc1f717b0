"""A marker for objects that never change inside a kernel."""

from typing import Any, Self


class Invariant:
    """Lets an object be used inside dynamic loops of a kernel without being carried through them.

    The DSL asks each object in a dynamic region for the values to carry from one trip to the next. An
    object whose values are all made before the region, and never assigned in it, has none.
    """

    def __extract_mlir_values__(self) -> list[Any]:
        return []

    def __new_from_mlir_values__(self, values: list[Any]) -> Self:
        return self
