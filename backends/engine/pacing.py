"""How many prompt tokens a step may carry while other requests are streaming. Pure.

A token budget alone cannot say: what keeps streams smooth on one device makes them stutter on
another. So the steps are measured, and prompts get a share of the time that the step's decodes
take: a stream's gap stays under twice the usual one. But the streams lose the prompts' time in any
case, and small pieces only make it take longer until everybody streams: where many wait, prompts
get more, up to the whole budget. Which step computes a token does not change the token.
"""

from __future__ import annotations

_SHARE = 0.5  # of the decodes' time; measured times scatter, and a gap is to stay under three usual
_WEIGHT_OF_WAITING = 16  # of the square of waiting to streaming: a quarter changes nothing
_LEAST = 16  # prompt tokens; a prompt must get on
_UNTRIED = 64  # prompt tokens in the first step that shows what they cost
_WEIGHT = 0.2  # of a new measurement
_CREDIBLE = 1.5  # a decode step longer than this many usual ones counts as so many


class Pacer:
    """Running means of what a decode step, and a prompt token beside it, take."""

    def __init__(self) -> None:
        self._decode: float | None = None  # seconds a step without prompts
        self._token: float | None = None  # seconds a prompt token

    def observe(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step with this many sequences decoding and this many prompt tokens took `seconds`."""
        usual = self._decode
        if not prompt_tokens:
            if usual is None:
                self._decode = seconds
            else:
                self._decode = usual + _WEIGHT * (min(seconds, _CREDIBLE * usual) - usual)
            return
        # Even a step with one token reads all weights once.
        cost = max(0.0, seconds - (usual or 0.0)) / prompt_tokens
        if self._token is None:
            self._token = cost
        else:
            weight = prompt_tokens / (prompt_tokens + _LEAST) * 2 * _WEIGHT
            self._token += weight * (cost - self._token)

    def allowance(self, budget: int, decodes: int, prompts: int) -> int:
        """Prompt tokens for the next step, up to `budget`; `prompts` requests lack their first."""
        if not decodes or self._decode is None:
            return budget
        if self._token is None:
            return min(budget, _UNTRIED)
        time = _SHARE * self._decode * max(1.0, _WEIGHT_OF_WAITING * (prompts / decodes) ** 2)
        if time >= self._token * budget:
            return budget
        return min(budget, max(_LEAST, int(time / self._token)))
