"""The one error a user sees: what is wrong, where, what was found, what is allowed, and what to do next."""

from __future__ import annotations


class QuantkitError(Exception):
    """Bad input or a refused request. The command line prints it without a traceback and exits with status 2.

    `message` is one lower-case sentence without a full stop; `file`, `tensor`, `value` and `allowed` are printed on
    lines of their own, `hint` last. Several errors found at once are joined by `join_errors`.
    """

    def __init__(
        self,
        message: str,
        *,
        file: object | None = None,
        tensor: str | None = None,
        value: object | None = None,
        allowed: object | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = None if file is None else str(file)
        self.tensor = tensor
        self.value = value
        self.allowed = allowed
        self.hint = hint

    def __str__(self) -> str:
        parts = {"file": self.file, "tensor": self.tensor, "value": self.value, "allowed": self.allowed}
        lines = [self.message, *(f"  {label}: {value}" for label, value in parts.items() if value is not None)]
        if self.hint:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)


def join_errors(what: str, errors: list[QuantkitError], limit: int = 20) -> QuantkitError:
    """One error that lists several (at most `limit` in full, then a count)."""
    if len(errors) == 1:
        return errors[0]
    shown = [str(e).replace("\n", "\n  ") for e in errors[:limit]]
    more = [f"... and {len(errors) - limit} more"] if len(errors) > limit else []
    return QuantkitError(f"{what}: {len(errors)} errors\n- " + "\n- ".join(shown + more))
