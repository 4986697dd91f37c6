"""How many prompt tokens a step may carry while other requests are streaming. Pure.

A token budget alone cannot say: what keeps streams smooth on one device makes them stutter on
another. So the steps are measured, and prompts get a share of the time that the step's decodes
take: a stream's gap stays under twice the usual one. But the streams lose the prompts' time in any
case, and small pieces only make it take longer until everybody streams: where many wait, prompts
get more, up to the whole budget. Which step computes a token does not change the token.
"""

from __future__ import annotations

_SHARE = 0.5  # of the decodes' time; measured times scatter, and a gap is to stay under three usual
_FEW = 2  # prompts that wait and are no queue yet: they come and go beside the streams
_URGENCY = 16  # of the queue beyond them to the streams, squared: a sixteenth changes nothing
_LEAST = 16  # prompt tokens; a prompt must get on
_UNTRIED = 64  # prompt tokens in the first step that shows what they cost
_WEIGHT = 0.1  # of a new measurement
_CREDIBLE = 1.5  # a step that takes longer than this many foreseen ones counts as so many
_SPREAD = 0.25  # variance of the decodes in a step, below which they say nothing of one's cost


class DecodeTime:
    """Seconds of a step with n decodes and no prompts: a line through the steps seen.

    Least squares with weights that fade (a running mean, variance and covariance). While n does not
    vary, the slope stays what it was. A line never falls with n, nor below 0 at n = 0.
    """

    def __init__(self) -> None:
        self.known = False
        self._decodes = self._seconds = 0.0  # running means
        self._variance = self._covariance = self._slope = 0.0

    def of(self, decodes: int) -> float:
        """Only when something is known."""
        return self._seconds + self._slope * (decodes - self._decodes)

    def observe(self, decodes: int, seconds: float) -> None:
        """One step without prompts."""
        if not self.known:
            self.known, self._decodes, self._seconds = True, decodes, seconds
            return
        seconds = min(seconds, _CREDIBLE * max(self.of(decodes), self._seconds))
        apart, later = decodes - self._decodes, seconds - self._seconds
        self._decodes += _WEIGHT * apart
        self._seconds += _WEIGHT * later
        self._variance = (1 - _WEIGHT) * (self._variance + _WEIGHT * apart * apart)
        self._covariance = (1 - _WEIGHT) * (self._covariance + _WEIGHT * apart * later)
        if self._variance > _SPREAD:
            self._slope = self._covariance / self._variance
        self._slope = min(max(self._slope, 0.0), self._seconds / max(self._decodes, 1.0))


class Pacer:
    """What decodes, and prompt tokens beside them, have been taking, and so what fits a step."""

    def __init__(self) -> None:
        self._usual = DecodeTime()
        self._token: float | None = None  # seconds a prompt token

    def observe(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step with this many sequences decoding and this many prompt tokens took `seconds`."""
        if seconds <= 0:  # a clock may stand still
            return
        if not prompt_tokens:
            self._usual.observe(decodes, seconds)
            return
        # Even a step with one token reads all weights once.
        usual = self._usual.of(decodes) if self._usual.known else 0.0
        if self._token is None:
            self._token = max(0.0, seconds - usual) / prompt_tokens
            return
        expected = usual + self._token * prompt_tokens
        cost = max(0.0, min(seconds, _CREDIBLE * expected) - usual) / prompt_tokens
        weight = prompt_tokens / (prompt_tokens + _LEAST) * 4 * _WEIGHT
        self._token += weight * (cost - self._token)

    def allowance(self, budget: int, decodes: int, streaming: int, prompts: int) -> int:
        """Prompt tokens for the next step, up to `budget`, beside its `decodes`.

        `streaming` requests have their first token, in this step or not; `prompts` lack it.
        """
        if not streaming or not self._usual.known:
            return budget
        if self._token is None:
            return min(budget, _UNTRIED)
        weight = max(1.0, (_URGENCY * max(prompts - _FEW, 0) / streaming) ** 2)
        time = _SHARE * weight * self._usual.of(decodes)
        if time >= self._token * budget:
            return budget
        return min(budget, max(_LEAST, int(time / self._token)))
