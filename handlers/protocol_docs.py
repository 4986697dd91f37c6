"""docs/protocol.md, made from the tables the server runs on.

`python -m mindstream.handlers.protocol_docs > docs/protocol.md` writes it; a test holds it equal.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterable, Sequence

from mindstream.handlers import triton_fields as table
from mindstream.handlers.error_map import RULES, UNEXPECTED
from mindstream.handlers.field_table import Field
from mindstream.handlers.metrics import Metrics
from mindstream.handlers.routes import ROUTES, Route
from mindstream.handlers.triton_item_fields import ITEM_FIELDS
from mindstream.handlers.triton_reply_fields import REPLY_FIELDS, ReplyField
from mindstream.plugin.errors import RequestError

_INTRO = """\
# Wire protocol

<!-- Made by `python -m mindstream.handlers.protocol_docs`; a test holds it equal. -->

mindstream speaks the protocol of a MindIE server. "Documented" is what MindIE's documentation
says, "real server" what its public source does. Where they differ, mindstream keeps to the
documentation; with `serving.validation: lenient` it takes every value that either of them takes.
"""

_BODY = """\
## Request body

`POST /v2/models/{m}/generate_stream` and `/generate` take a JSON object:

- Strict UTF-8 without a byte order mark, at most `serving.max_request_length` MiB (413 beyond),
  nested at most `serving.max_json_depth` levels, the body itself being the first.
- `NaN`, `Infinity`, numbers outside double precision (1e400), integers of more than 4,300 digits
  and lone surrogate escapes are not JSON and refused wherever they stand.
- Of equal keys the last one counts. Unknown keys are ignored. `null` is the same as absent.
- A float may be written as an integer. `5.0` is no integer, and a boolean is never a number.
- Every fault is told before a stream opens: as plain JSON with its status.

Faults are looked for in this order, and the first one is told: model in the URL (404), JSON (422),
service stopped (503), `id`, `text_input`, its tokens, `parameters` in the order of the table, then
the engine's limits (424).
"""

_LIST = """\
### text_input as a list

Items are `{"type": "text", "text": ...}` or `{"type": T, T: address}`. Text items alone are joined
as they are. At most 20 items are media, together at most 1000 MiB.

"""

_MEDIA = """\

- Web addresses are fetched only from hosts that the environment variable
  `ALLOWED_MEDIA_DOMAINS_ENV` lists (host names or addresses, separated by commas; not set: none),
  only if every address of the host is public, to that very address, and without redirects.
- Local files are read only below `serving.media.local_dir`, links resolved.
- Media are decoded with bounds on pixels, scans and work: a file that only claims to be a picture,
  or that would take minutes to decode, is refused.

What fails of this is told by 422, and what takes longer than `serving.e2e_timeout` by 500.

**A model that takes text only stops here**: media that passed all of it are refused by 422, "The
model M takes text only". Without the packages of `mindstream[media]` on the server nothing is
fetched or decoded, and the same 422 comes right behind the parsing.

### Recompute

With the header `is-recompute: true`, `text_input` is `promptLength,id,id,...`: the first
`promptLength` ids are the prompt, the others an earlier attempt generated. `generated_tokens`
counts on, and `max_new_tokens` counts them too.
"""

_STREAM = """\
## Stream

Status 200, `Content-Type: text/event-stream`. An event is `data:` (no space), compact JSON with
the keys in the order below, and two line feeds; one event a token, one write an event. There is no
`[DONE]`: the stream ends behind the event with the finish reason. Non-ASCII text is raw UTF-8;
only U+0085, U+2028 and U+2029 are escaped, at which some clients would break a line.

The reply of `/generate` has the same keys without the two times, and no `data:`.

"""

_FAILURES = """\
## Failures

A body is `{"error": sentence, "error_type": word}`; that of 413 has `message` before them, which
is the real server's only key. A 503 that will pass carries `Retry-After`.

"""

_AFTER_OPEN = """\

After a stream has opened, a failure is its last event,
`data:{"id":...,"error":...,"error_type":...}`, and the stream ends as it should. With
`serving.compat.raw_error_text: true` it is the real server's bare text without any framing.

`timeout`, `serving.token_timeout` and `serving.e2e_timeout` end a request with
`Engine callback timeout: ` and `client timeout`, `server tokenTimeout` or `server e2eTimeout`.
In a stream the first two start again with every token.

A client that closes its connection, or its sending half, ends its request: the engine is free of
it by the next step. Where the client left unread bytes behind its request (pipelining), the close
is noticed within 200 ms.

What is not HTTP is answered by 400 without a body, or, with headers of more than 64 KiB, by the
end of the connection. A stream to an HTTP/1.0 client ends with its connection, keep-alive or not.
"""

_ROUTES = """\
## Routes

The optional `/versions/{v}` names a deployed version, which is `1`; any other is 404. The real
server does not route the segment. An unknown path and an unknown method of a known path are 404
with a JSON body (the real server's is empty). Every reply has a `RequestUUID` header.

"""

_STOP = """\

`POST /v2/models/{m}/stopInfer` with `{"id": ...}` ends a running request: its last event has
`finish_reason` `stop_sequence` and what text was held back, and the stop call answers with its own
body. An id that does not run is 404, as documented; with `serving.validation: lenient` it is the
real server's 500.

`POST /v2/models/{m}/infer` takes `inputs` with exactly one tensor (`name`, `shape` `[n]` or
`[1,n]`, `datatype` `UINT32`, `data`), `outputs`, and `parameters` beside `inputs` (documented) or
inside the tensor (real server; wins).

`GET /v2/models/{m}/config` has MindIE's keys first, then the limits and, under `defaults`, every
value that a request may leave out with where it came from.
"""

_METRICS = """\

## Metrics

`GET /metrics` answers at any time, in Prometheus' text format; the real server does so only with
the environment variable `MIES_SERVICE_MONITOR_MODE=1`, which is not needed here. Names and bucket
bounds are MindIE's. The one label is `model_name`; the real server joins several models' names to
one. Counters count since the server's start, also over restarts of its engine.

Times are the engine's own, so a slow client does not count. The three lengths and latencies of a
whole request are those of requests that came to their end. Failed is what was answered with an
error, before or inside a stream; a request whose client left is only received. An average covers
the last minute, or the time since the last look if that is longer ago. What counts prefix matches
does so in tokens.

"""

_KEY_HEAD = ("key", "type", "here", "documented", "real server")


def render() -> str:
    """The whole document."""
    parts = [
        _INTRO,
        _BODY,
        _table(
            ("field", "type", "accepted", "absent", "here", "documented", "real server"),
            (_field_row(row) for row in (*table.BODY, *table.PARAMETERS)),
        ),
        _LIST + _table(_KEY_HEAD, map(_key_row, ITEM_FIELDS)) + _MEDIA,
        _STREAM + _table(_KEY_HEAD, map(_key_row, REPLY_FIELDS)),
        _FAILURES + _table(("status", "error_type", "when"), _failure_rows()) + _AFTER_OPEN,
        _ROUTES + _table(("method", "path", "what it does"), map(_route_row, ROUTES)) + _STOP,
        _METRICS.lstrip("\n") + _table(("metric", "type", "what it tells"), _metric_rows()),
    ]
    return "\n".join(parts)


def _field_row(row: Field) -> tuple[str, ...]:
    where = "" if row.place == "body" else "parameters."
    kind = {"text": "string or array"}.get(row.kind, row.kind)
    strict, lenient = row.range("strict"), row.range("lenient")
    accepted = strict.text if strict else row.pattern.pattern if row.pattern else ""
    accepted = f"`{accepted}`" if accepted else "any"
    if lenient and lenient != strict:
        accepted += f"; lenient `{lenient.text}`"
    absent = "**refused**" if row.required else row.default_words
    if row.default is not None:
        absent = json.dumps(row.default)
    return (
        f"`{where}{row.name}`",
        kind,
        accepted,
        absent,
        row.ours or "As documented.",
        row.documented,
        row.real_server,
    )


def _key_row(row: ReplyField) -> tuple[str, ...]:
    return f"`{row.name}`", row.kind, row.ours, row.documented, row.real_server


def _failure_rows() -> Iterable[tuple[str, ...]]:
    for rule in RULES:
        if rule.kind is RequestError:
            continue  # the base, for a class that nobody has written yet
        yield str(rule.status), rule.error_type, _first_line(rule.kind).partition(";")[0]
    yield str(UNEXPECTED.status), UNEXPECTED.error_type, "A fault of the server itself."


def _route_row(route: Route) -> tuple[str, ...]:
    path = route.path.replace("{v}", "[/versions/{v}]")
    return route.method, f"`{path}`", _first_line(route.handler)


def _metric_rows() -> Iterable[tuple[str, ...]]:
    for metric in Metrics({}).collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        yield f"`{name}`", metric.type, metric.documentation


def _first_line(subject: type) -> str:
    return (inspect.getdoc(subject) or "").splitlines()[0]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )


if __name__ == "__main__":
    sys.stdout.write(render())
