"""SamplingParams: how one request chooses its tokens and when it ends.

Checked where it is made: an object that exists is valid on its own. What depends on the model (ids
in range, window, limit on `n`) is checked when the request is added. Names and meanings are those
vLLM users know.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pico_vllm.errors import InvalidRequestError, show

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would only overflow."""

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_SALT_CHARS = 1024
MAX_ENDING_IDS = 256
"""Ids that min_tokens holds back: the request's stop ids and the model's EOS ids together."""
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class TokenBiases(Mapping[int, float]):
    """Numbers by token id, as they were when they were checked: not to be changed afterwards."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[int, float]) -> None:
        self._values = dict(values)

    def __getitem__(self, token_id: int) -> float:
        return self._values[token_id]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    max_tokens: int | None = 16
    """Most tokens to generate; None fills the window."""
    min_tokens: int = 0
    """EOS, stop ids and stop strings end the answer only after this many tokens."""
    temperature: float = 1.0
    """In [0, 2]; below 1e-5 is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens, exactly k also on ties; 0 and -1 keep all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this; in (0, 1]."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as likely as the most likely one; in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token generated so far; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time the token was generated; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output;
    in [0.01, 10]."""
    logit_bias: Mapping[int, float] | None = None
    """Token id to a number in [-100, 100] added to its logit; kept as a TokenBiases."""
    seed: int | None = None
    """int64. The same seed gives the same noise whatever else is in the batch."""
    n: int = 1
    """How many answers to give; answer i uses sample index i of the seed."""
    stop: str | Sequence[str] | None = None
    """Strings that end the answer, also across tokens; they are cut off the text."""
    stop_token_ids: Sequence[int] | None = None
    """Ids that end the answer; the id stays in token_ids."""
    include_stop_str_in_output: bool = False
    """Leave the stop string that ended the answer in its text."""
    ignore_eos: bool = False
    """Go on after EOS, up to max_tokens or the caller's own stops."""
    logprobs: int | None = None
    """Log-probabilities of the chosen token and this many most likely ones, from the model's raw
    distribution."""
    prompt_logprobs: int | None = None
    """The same for each prompt token given the ones before it."""
    skip_special_tokens: bool = True
    """Leave EOS, role marks and the like out of the text; token_ids keep them."""
    detokenize: bool = True
    """False gives ids only and empty text."""
    priority: int = 0
    """Lower leaves the waiting line sooner, under scheduling_policy priority; in [-1000, 1000]."""
    cache_salt: str | None = None
    """Cached prefixes are shared among requests of the same salt only; those without one share
    theirs among themselves."""
    stop_strings: tuple[str, ...] = field(init=False, default=())
    """`stop` as a tuple."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1, "or None to fill the window")
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}; lower "
                "min_tokens",
                param="min_tokens",
            )
        _check_float("temperature", self.temperature, 0.0, 2.0)
        _check_int("top_k", self.top_k, -1, 2**31 - 1, "0 or -1 keeps all tokens")
        _check_float("top_p", self.top_p, 0.0, 1.0, exclusive_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        if self.seed is not None:
            _check_int("seed", self.seed, INT64_MIN, INT64_MAX)
        _check_int("n", self.n, 1, 128)
        _check_int("priority", self.priority, -1000, 1000)
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _check_int(name, value, 0, MAX_LOGPROBS)
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "detokenize",
        ):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(
                    f"{name} must be True or False, not {show(getattr(self, name))}", param=name
                )
        salt = self.cache_salt
        # Half a character cannot be written down, which tiers below the device do with a salt.
        is_text = isinstance(salt, str) and not any("\ud800" <= each <= "\udfff" for each in salt)
        if salt is not None and not (is_text and 1 <= len(salt) <= MAX_SALT_CHARS):
            raise InvalidRequestError(
                f"cache_salt must be a string of 1 to {MAX_SALT_CHARS} whole characters, not "
                f"{show(salt)}",
                param="cache_salt",
            )
        object.__setattr__(self, "stop_strings", _checked_stop(self.stop))
        if self.stop_strings and not self.detokenize:
            raise InvalidRequestError(
                "stop strings need detokenize=True; or use stop_token_ids", param="stop"
            )
        object.__setattr__(self, "stop_token_ids", _checked_stop_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def _check_int(name: str, value: object, low: int, high: int, hint: str = "") -> None:
    # bool is an int to Python and never what the caller of a count meant.
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        tail = f"; {hint}" if hint else ""
        raise InvalidRequestError(
            f"{name} must be a whole number from {low} to {high}, not {show(value)}{tail}",
            param=name,
        )


def _check_float(
    name: str, value: object, low: float, high: float, *, exclusive_low: bool = False
) -> None:
    # Written as `not (low <= x <= high)` so that NaN fails too.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or (exclusive_low and value == low):  # type: ignore[operator]
        bracket = "(" if exclusive_low else "["
        raise InvalidRequestError(
            f"{name} must be a number in {bracket}{low:g}, {high:g}], not {show(value)}",
            param=name,
        )


def _checked_stop(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)) or len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"stop must be a string or a list of at most {MAX_STOP_STRINGS} strings, not "
            f"{show(stop)}",
            param="stop",
        )
    for text in strings:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequestError(
                f"each stop string has 1 to {MAX_STOP_CHARS} characters, not {show(text)}",
                param="stop",
            )
    return tuple(strings)


def _checked_stop_ids(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, (list, tuple)) or len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequestError(
            f"stop_token_ids must be a list of at most {MAX_STOP_TOKEN_IDS} ids, not {show(ids)}",
            param="stop_token_ids",
        )
    for token_id in ids:
        _check_int("stop_token_ids", token_id, 0, 2**31 - 1)
    return tuple(ids)


def _checked_bias(bias: object) -> TokenBiases | None:
    if bias is None or (isinstance(bias, Mapping) and len(bias) == 0):
        return None
    if not isinstance(bias, Mapping) or len(bias) > MAX_LOGIT_BIAS:
        count = f" of {len(bias)} entries" if isinstance(bias, Mapping) else f", not {show(bias)}"
        raise InvalidRequestError(
            f"logit_bias must map at most {MAX_LOGIT_BIAS} token ids to numbers{count}",
            param="logit_bias",
        )
    checked = {}
    for key, value in bias.items():
        # OpenAI clients send the ids as JSON object keys, so digits in a string count as an id.
        token_id = (
            int(key)
            if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 20
            else key
        )
        is_id = isinstance(token_id, int) and not isinstance(token_id, bool)
        if not is_id or not 0 <= token_id < 2**31:
            raise InvalidRequestError(
                f"logit_bias key {show(key)} is not a token id", param="logit_bias"
            )
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # Written as `not (low <= x <= high)` so that NaN fails too.
        if not is_number or not -100.0 <= value <= 100.0:
            raise InvalidRequestError(
                f"logit_bias of token {token_id} must be a number in [-100, 100], not "
                f"{show(value)}",
                param="logit_bias",
            )
        checked[token_id] = float(value)
    return TokenBiases(checked)
