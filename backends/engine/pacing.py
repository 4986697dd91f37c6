"""How many prompt tokens a step may carry while other requests are streaming. Pure.

A token budget alone cannot say: what keeps streams smooth on one device makes them stutter on
another. So the steps are measured, and prompts get a share of the time that the step's decodes
take: a stream's gap stays under about twice the usual one. But the streams lose the prompts' time
in any case, and small pieces only make it take longer until everybody streams: where many wait,
prompts get more, up to the whole budget. Which step computes a token does not change the token.
"""

from __future__ import annotations

from math import sqrt

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]  # [3]
Matrix = NDArray[np.float64]  # [3, 3]

_SHARE = 0.5  # of the decodes' time; measured times scatter, and a gap is to stay under three usual
_WEIGHT_OF_WAITING = 16  # of the square of waiting to streaming: a quarter changes nothing
_LEAST = 16  # prompt tokens; a prompt must get on
_UNTRIED = 64  # prompt tokens in the first step that shows what they cost
_NOISE = 0.1  # of a step's time: how far a measurement is believed to be off
_DRIFT = 0.02  # of each cost: how far it is believed to move between two steps
_LEAST_COST = 0.01  # of a step's time: what all of a kind costs, for its drift
_CREDIBLE = 2.5  # standard deviations; what is further off counts as so many
_DOUBT = 4.0  # the variance it leaves, to the square of what it moved


class StepTime:
    """seconds = step + decodes * decode + prompt tokens * token; these three costs are estimated.

    A Kalman filter over the steps seen: a step that has nothing of a kind says nothing of its cost,
    and where decodes and prompts always come together, what was known before tells them apart.
    """

    def __init__(self) -> None:
        self._costs: Vector = np.zeros(3)
        self._covariance: Matrix = np.zeros((3, 3))
        self.known = False  # something has been measured

    @property
    def token(self) -> float:
        """Seconds a prompt token; 0 if that is not known."""
        return float(self._costs[2])

    def predict(self, decodes: int, prompt_tokens: int) -> float:
        """Seconds; 0 if nothing is known."""
        return float(self._costs @ (1.0, decodes, prompt_tokens))

    def observe(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step of this kind took `seconds`, which is above 0."""
        kind = np.array([1.0, decodes, prompt_tokens])
        each = 1.0 / np.maximum(kind, 1.0)
        if not self.known:
            self.known = True
            self._covariance = np.diag((seconds * each * (1.0, 0.5, 0.5)) ** 2)
        expected = self.predict(decodes, prompt_tokens)
        scale = expected or seconds
        noise = (_NOISE * scale) ** 2
        projected = self._covariance @ kind
        variance = max(float(kind @ projected), 0.0) + noise
        bound = _CREDIBLE * sqrt(variance)
        surprise = min(max(seconds - expected, -bound), bound)
        gain = projected / variance
        self._costs = np.maximum(self._costs + gain * surprise, 0.0)
        kept = np.eye(3) - np.outer(
            gain, kind
        )  # Joseph's form: rounding makes no variance negative
        self._covariance = kept @ self._covariance @ kept.T + np.outer(gain, gain) * noise
        if abs(surprise) == bound:  # once it is chance; again and again, the costs have changed
            self._covariance += np.outer(gain, gain) * _DOUBT * bound**2
        # Beside decodes, what is new is the prompt: its tokens cost more the longer it is.
        drifting = (not prompt_tokens, decodes and not prompt_tokens, prompt_tokens)
        drift = _DRIFT * np.maximum(self._costs, _LEAST_COST * scale * each) * np.sign(drifting)
        self._covariance += np.diag(drift**2)
        # No cost is less certain than that it is a part of a step.
        excess = np.sqrt(np.diag(self._covariance)) / (scale * each)
        self._covariance /= np.outer(np.maximum(excess, 1.0), np.maximum(excess, 1.0))


class Pacer:
    """Shares a step between decodes and prompts by what they have been taking."""

    def __init__(self) -> None:
        self._time = StepTime()
        self._tried = False  # a step with prompt tokens has been seen

    def observe(self, decodes: int, prompt_tokens: int, seconds: float) -> None:
        """A step with this many sequences decoding and this many prompt tokens took `seconds`."""
        self._tried = self._tried or prompt_tokens > 0
        if seconds > 0:  # a clock may stand still
            self._time.observe(decodes, prompt_tokens, seconds)

    def allowance(self, budget: int, decodes: int, prompts: int) -> int:
        """Prompt tokens for the next step, up to `budget`; `prompts` requests lack their first."""
        if not decodes or not self._time.known:
            return budget
        if not self._tried:
            return min(budget, _UNTRIED)
        weight = max(1.0, _WEIGHT_OF_WAITING * (prompts / decodes) ** 2)
        time = _SHARE * weight * self._time.predict(decodes, 0)
        if time >= self._time.token * budget:
            return budget
        return min(budget, max(_LEAST, int(time / self._time.token)))
