"""What can go wrong, as one tree. Wire-neutral: handlers map each class to a status and a body.

    MindstreamError
    ├── ConfigError            a deployment cannot start: file or field, value found, what is right
    └── RequestError           one request ends with this instead of (more) tokens
        ├── InvalidRequest     a field is wrong: field, bound, value given
        ├── NotFound           no such model, request id or route
        ├── PayloadTooLarge    the body exceeds the deployment's limit
        ├── RequestRefused     well formed, but the engine can never run it (prompt too long, ...)
        ├── Overloaded         no room now: come back after `retry_after` seconds
        ├── ServiceStopped     the server is draining or stopped
        ├── GenerationTimeout  the client's, the token's or the end-to-end limit passed
        └── BackendFailed      the engine broke while the request was in it

Every message is one sentence for the person who reads the reply or the terminal. Messages carry no
prompt and no secret.
"""

from __future__ import annotations

from typing import Literal


class MindstreamError(Exception):
    """Base of everything mindstream raises on purpose; `str()` is fit to show to a user."""


class ConfigError(MindstreamError):
    """A deployment file, a weight directory or the machine does not allow this deployment to start.

    The command line prints the message alone and exits with status 2.
    """


class RequestError(MindstreamError):
    """One request ends with this."""


class InvalidRequest(RequestError):
    """A field of the request is missing, of the wrong type or out of its range."""


class NotFound(RequestError):
    """The named model, request id or route does not exist here."""


class PayloadTooLarge(RequestError):
    """The request body exceeds `serving.max_request_length` MiB."""


class RequestRefused(RequestError):
    """The request is well formed but can never run in this deployment."""


class Overloaded(RequestError):
    """The waiting queue is full, or the engine is loading or being restarted.

    `retry_after` is a whole number of seconds, at least 1, for the Retry-After header.
    """

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ServiceStopped(RequestError):
    """The server no longer takes requests."""


TimeoutKind = Literal["client timeout", "server tokenTimeout", "server e2eTimeout"]


class GenerationTimeout(RequestError):
    """A time limit passed.

    `kind` says which. The texts are MindIE's.
    """

    def __init__(self, kind: TimeoutKind) -> None:
        super().__init__(f"Engine callback timeout: {kind}")
        self.kind = kind


class BackendFailed(RequestError):
    """The engine broke, or gave an answer that cannot be used, while the request was in it."""
