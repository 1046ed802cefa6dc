"""A decoder as a language model of lm_eval."""

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from experiments.zero_shot_scorer import Pair, Scorer


class DecoderLM(TemplateLM):
    """lm_eval's three kinds of requests, answered by a `Scorer`.

    Text is cut into context and continuation, and long text into windows, as by lm_eval's own
    wrapper of Hugging Face models; empty contexts begin with end of text.
    """

    def __init__(self, scorer: Scorer):
        """Wrap a scorer."""
        super().__init__()
        self.scorer = scorer

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document."""
        return self.scorer.tokenizer.eot

    @property
    def max_length(self) -> int:
        """Most tokens that are read at once."""
        return self.scorer.max_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """Text to ids; there are no special ones to add."""
        return self.scorer.tokenizer.encode(string)

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        return self.scorer.loglikelihoods(pairs)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-probability of each whole text, in windows of max_length tokens."""
        pairs: list[Pair] = []
        owners: list[int] = []
        for index, (text,) in enumerate(request.args for request in requests):
            windows = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
            )
            pairs += map(make_disjoint_window, windows)
            owners += [index] * (len(pairs) - len(owners))
        sums = [0.0] * len(requests)
        for index, (value, _) in zip(owners, self.scorer.loglikelihoods(pairs)):
            sums[index] += value
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The likeliest continuation of each text.

        Raises:
            ValueError: if a task wants samples.
        """
        texts = [""] * len(requests)
        groups: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for index, request in enumerate(requests):
            wanted = normalize_gen_kwargs(request.args[1])
            if wanted["do_sample"]:
                raise ValueError(
                    f"a task asks for generation with {request.args[1]}, expected do_sample=False: "
                    "answers are the likeliest text."
                )
            kind = (tuple(filter(None, wanted["until"])), wanted["max_gen_toks"])
            groups.setdefault(kind, []).append(index)
        for (until, limit), members in groups.items():
            prompts = [
                self.tok_encode(requests[index].args[0]) or [self.prefix_token_id]
                for index in members
            ]
            for index, text in zip(members, self.scorer.continuations(prompts, until, limit)):
                texts[index] = text
        return texts
