"""From an exception to an HTTP status and body: the one place. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

from mindstream.handlers.wire_json import encode
from mindstream.plugin import errors


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What a client is told. `error_type` is the real server's word for the status."""

    status: int
    error_type: str
    message: str
    retry_after: int | None = None  # seconds

    def body(self) -> bytes:
        """The plain JSON reply, before a stream has opened."""
        reply = {"error": self.message, "error_type": self.error_type}
        if self.status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            # The real server has `message` here and no `error`; clients of both find theirs.
            reply = {"message": self.message, **reply}
        return encode(reply)


class PlainFailure(errors.BackendFailed):
    """A failure of the server that its own words tell in full."""


@dataclass(frozen=True, slots=True)
class ErrorRule:
    """How one class of the error tree is answered; `prefix` goes before its message."""

    kind: type[errors.MindstreamError]
    status: int
    error_type: str
    prefix: str = ""
    bare: str = ""  # after a stream has opened, the real server's bare text; "": the message


# The first rule whose class matches counts, so a subclass stands before its base.
RULES = (
    ErrorRule(errors.InvalidRequest, 422, "Input Validation Error"),
    ErrorRule(errors.NotFound, 404, "NotFoundError"),
    ErrorRule(errors.PayloadTooLarge, 413, "Payload Too Large"),
    ErrorRule(
        errors.RequestRefused, 424, "Generation Error", prefix="Failed to enqueue inferRequest. "
    ),
    ErrorRule(errors.Overloaded, 503, "Service Unavailable"),
    ErrorRule(errors.ServiceStopped, 503, "Service Unavailable"),
    ErrorRule(errors.GenerationTimeout, 500, "Incomplete Generation"),
    ErrorRule(PlainFailure, 500, "Incomplete Generation"),
    ErrorRule(
        errors.BackendFailed,
        500,
        "Incomplete Generation",
        prefix="Failed to get engine response. ",
        bare="Failed to get engine response",
    ),
    ErrorRule(errors.RequestError, 500, "Incomplete Generation"),
)
# A fault of the server itself. Its text never leaves the log: it could hold anything.
UNEXPECTED = ErrorReply(500, "Internal Server Error", "Server internal error")


def reply_for(error: BaseException) -> ErrorReply:
    """The reply to a request that ended with `error`."""
    rule = _rule(error)
    if rule is None:
        return UNEXPECTED
    retry_after = error.retry_after if isinstance(error, errors.Overloaded) else None
    return ErrorReply(rule.status, rule.error_type, f"{rule.prefix}{error}", retry_after)


def bare_text(error: BaseException) -> str:
    """What the real server writes into an open stream: a text without any framing."""
    rule = _rule(error)
    if rule is None:
        return UNEXPECTED.message
    return rule.bare or str(error)


def reply_for_status(status: int, path: str) -> ErrorReply:
    """The reply to a fault that HTTP itself found. An unknown method is an unknown route."""
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        return ErrorReply(404, "NotFoundError", f"No route for this method and path: {path}")
    if status in {known.value for known in HTTPStatus} and status < 500:
        phrase = HTTPStatus(status).phrase
        return ErrorReply(status, phrase, f"{phrase}.")
    return UNEXPECTED


def _rule(error: BaseException) -> ErrorRule | None:
    return next((rule for rule in RULES if isinstance(error, rule.kind)), None)
