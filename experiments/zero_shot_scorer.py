"""Log-probabilities and greedy continuations of token sequences of any lengths, in fixed shapes.

Requests are put into batches of a few shapes, each compiled once: lengths are powers of two, and
every batch holds about the same number of tokens. What was answered before, in this run or in a
killed one, is not computed again.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import nnx
from tqdm import tqdm

from experiments.common.tokenizer import Tokenizer
from experiments.zero_shot_answers import Answers, request_key
from lowrank_attn.models.decoder import Decoder
from lowrank_attn.models.generate import stream

SHORTEST = 32
# Logits that are in memory at a time, at most, unless one row has more.
LOGITS = 2**26

Pair = tuple[Sequence[int], Sequence[int]]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests that are computed together.

    Attributes:
        indices: which ones.
        rows: B, at least so many.
        length: T, of the inputs.
        scored: S, positions at the end of the inputs whose next tokens are scored.
    """

    indices: tuple[int, ...]
    rows: int
    length: int
    scored: int


def plan(sizes: Sequence[tuple[int, int]], max_length: int, batch_tokens: int) -> tuple[Batch, ...]:
    """Put requests into batches of few shapes, the longest first.

    Args:
        sizes: of each request: tokens that are read, at most max_length, and tokens to score.
        max_length: the longest T.
        batch_tokens: B T, at most, unless one row has more.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for index, (length, scored) in enumerate(sizes):
        T = min(_round_up(length), max_length)
        groups.setdefault((T, SHORTEST if scored <= SHORTEST < T else T), []).append(index)
    batches = []
    for (T, S), members in sorted(groups.items(), reverse=True):
        # rows of a batch are a power of two, so that what is left over makes few more shapes
        most = 1 << (max(batch_tokens // T, 1).bit_length() - 1)
        for start in range(0, len(members), most):
            part = tuple(members[start : start + most])
            batches.append(Batch(part, _round_up(len(part), 1), T, S))
    return tuple(batches)


class Scorer:
    """A model that answers requests.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        answers: where answers are kept.
        fingerprint: see `model_fingerprint`; of the tokenizer too.
        max_length: most tokens that are read at once; longer ones lose their beginning, aloud.
        batch_tokens: tokens of a batch to score.
        batch_size: prompts that are continued at a time.

    Raises:
        ValueError: if the tokenizer does not fit the model.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        answers: Answers,
        fingerprint: str,
        *,
        max_length: int = 2048,
        batch_tokens: int = 16384,
        batch_size: int = 32,
    ):
        tokenizer.check_fits(model.vocab_size)
        self.model = model
        self.tokenizer = tokenizer
        self.answers = answers
        self.fingerprint = fingerprint
        self.max_length = max_length
        self.batch_tokens = batch_tokens
        self.batch_size = batch_size
        self.computed = 0
        self.truncated = 0

    def loglikelihoods(self, pairs: Sequence[Pair]) -> list[tuple[float, bool]]:
        """The log-probability of each continuation, and whether it is the likeliest text.

        Rows that pad the embedding are ids like others here, as in training.

        Args:
            pairs: tokens of a context, at least one, and of its continuation.

        Raises:
            ValueError: for a request without tokens, or a continuation longer than max_length.
        """
        for context, continuation in pairs:
            if not context or not 1 <= len(continuation) <= self.max_length:
                raise ValueError(
                    f"a request has a context of {len(context)} tokens and a continuation of "
                    f"{len(continuation)}, expected at least 1, and at most max_length="
                    f"{self.max_length} in the continuation."
                )
        room = self.max_length + 1  # the last token is not read
        self._warn(sum(len(a) + len(b) > room for a, b in pairs), len(pairs))
        requests = [([*a, *b][-room:], len(b)) for a, b in pairs]
        found = self._answer("loglikelihood", requests, self._score)
        return [(float(value), bool(greedy)) for value, greedy in found]

    def continuations(
        self, prompts: Sequence[Sequence[int]], until: Sequence[str], max_new_tokens: int
    ) -> list[str]:
        """The likeliest text after each prompt, token by token, before the first stop.

        Args:
            prompts: tokens, at least one each.
            until: strings that end a text; so does the end-of-text token.
            max_new_tokens: most tokens of a text.

        Raises:
            ValueError: if max_new_tokens leave no room for a prompt.
        """
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ValueError(
                f"{max_new_tokens} new tokens leave no room for a prompt within max_length="
                f"{self.max_length}."
            )
        self._warn(sum(len(prompt) > room for prompt in prompts), len(prompts))
        requests = [(list(p[-room:]), list(until), max_new_tokens) for p in prompts]
        return self._answer("generate", requests, self._continue)

    def _answer(
        self,
        kind: str,
        requests: Sequence[Any],
        compute: Callable[[Sequence[Any]], Iterable[dict[int, Any]]],
    ) -> list[Any]:
        """Answers to requests, computing those that are new, each once."""
        keys = [request_key(self.fingerprint, kind, request) for request in requests]
        new = {key: r for key, r in zip(keys, requests) if key not in self.answers}
        names, asked = list(new), list(new.values())
        with tqdm(desc=kind, total=len(requests), mininterval=1) as bar:
            bar.update(len(requests) - len(asked))
            for part in compute(asked):
                self.answers.add({names[index]: answer for index, answer in part.items()})
                self.computed += len(part)
                bar.update(len(part))
        return [self.answers[key] for key in keys]

    def _score(self, requests):
        sizes = [(len(tokens) - 1, scored) for tokens, scored in requests]
        run = _scoring_program(self.model)
        for batch in plan(sizes, self.max_length, self.batch_tokens):
            B, T, S = batch.rows, batch.length, batch.scored
            tokens, mask = np.zeros((B, T + 1), np.int32), np.zeros((B, T + 1), bool)
            count = np.zeros((B, 1), np.int32)
            for row in range(B):  # rows without a request repeat the first one
                ids, scored = requests[batch.indices[row if row < len(batch.indices) else 0]]
                tokens[row, -len(ids) :], mask[row, -len(ids) :] = ids, True
                count[row] = scored
            scores = run(tokens[:, :-1], mask[:, :-1], tokens[:, -S:], np.arange(S) >= S - count)
            values, greedy = map(np.asarray, scores)
            if not np.all(np.isfinite(values)):
                raise FloatingPointError("the model gave log-probabilities that are not finite.")
            yield {
                index: [float(values[row]), bool(greedy[row])]
                for row, index in enumerate(batch.indices)
            }

    def _continue(self, requests) -> Iterator[dict[int, Any]]:
        kinds: dict[Any, list[int]] = {}
        for index, (_, until, limit) in enumerate(requests):
            kinds.setdefault((tuple(until), limit), []).append(index)
        for (until, limit), members in kinds.items():
            members.sort(key=lambda index: -len(requests[index][0]))
            for start in range(0, len(members), self.batch_size):
                part = members[start : start + self.batch_size]
                rows = part + part[:1] * (_round_up(len(part), 1) - len(part))
                texts = self._texts([requests[index][0] for index in rows], until, limit)
                yield dict(zip(part, texts))

    def _texts(self, prompts, until, limit):
        eot = self.tokenizer.eot
        tokens = stream(
            self.model,
            prompts,
            max_new_tokens=limit,
            stop_tokens=(eot,),
            max_length=self.max_length,
        )
        ids: list[list[int]] = [[] for _ in prompts]
        texts, ended = [""] * len(prompts), [False] * len(prompts)
        for step in tokens:
            for row, token in enumerate(step):
                if token < 0 or token == eot:
                    ended[row] = True
                if not ended[row]:
                    ids[row].append(int(token))
                    texts[row] = self.tokenizer.decode(ids[row])
                    ended[row] = any(stop in texts[row] for stop in until)
            if all(ended):
                break
        return [_before(text, until) for text in texts]

    def _warn(self, count, total):
        self.truncated += count
        if count:
            logging.warning(
                "%d of %d requests are too long for max_length=%d: they lose their beginning.",
                count,
                total,
                self.max_length,
            )


def _before(text, until):
    """The text before the first of these strings, one string after another, as lm_eval cuts it."""
    for stop in until:
        text = text.split(stop)[0]
    return text


def _round_up(count, least=SHORTEST):
    """A power of two that is no less."""
    return max(least, 1 << (count - 1).bit_length())


def _scoring_program(model):
    graph, params = nnx.split(model)
    return functools.partial(_compiled(graph), params)


@functools.lru_cache(maxsize=2)
def _compiled(graph):
    @jax.jit
    def run(params, inputs, mask, targets, counts):
        """Scores of rows [B, T]: sums [B] over the last S positions that count, and greedy [B]."""
        model = nnx.merge(graph, params)
        x, _ = model.hidden(inputs, mask)
        S = targets.shape[1]

        def row(x, target, counts):
            logits = model.logits(x)
            chosen = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
            values = chosen - jax.nn.logsumexp(logits, axis=-1)
            likeliest = jnp.argmax(logits, axis=-1) == target
            return jnp.sum(jnp.where(counts, values, 0)), jnp.all(likeliest | ~counts)

        at_once = max(LOGITS // (S * model.embedding.num_embeddings), 1)
        rows = (x[:, -S:], targets, counts)
        return jax.lax.map(lambda arguments: row(*arguments), rows, batch_size=at_once)

    return run
