"""Source and candidate on the same text, one block of one model in memory at a time.

Both chains of hidden states go through block 0, then both through block 1, and so on; samples of one length are stacked
into batches, since a CPU multiplies 2,000 tokens faster than 4 times 500. At the end both heads are loaded once.

Letters: N samples of one batch, L tokens of a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from quantkit.calibrate.activations import Activations, State
from quantkit.calibrate.blocks import BlockModel
from quantkit.calibrate.observe import Cache, Compare
from quantkit.calibrate.perplexity import CHUNK, Scores, compare_logits
from quantkit.kernels.errors import QuantkitError

BATCH_TOKENS = 2048

# (blocks done, of how many); called after each block of either model and after the head
Progress = Callable[[int, int], None]


def batches(samples: Sequence[torch.Tensor], tokens: int = BATCH_TOKENS) -> list[torch.Tensor]:
    """Samples [L] in order, those of one length that follow each other stacked to [N, L] of at most `tokens` tokens."""
    found: list[list[torch.Tensor]] = []
    for ids in samples:
        last = found[-1] if found else []
        if last and len(last[0]) == len(ids) and (len(last) + 1) * len(ids) <= tokens:
            last.append(ids)
        else:
            found.append([ids])
    return [torch.stack(group) for group in found]


def evaluate(
    source: BlockModel,
    candidate: BlockModel,
    samples: Sequence[torch.Tensor],
    *,
    cache: Cache | None = None,
    compare: Compare | None = None,
    memory: int = 1 << 32,
    folder: Path | None = None,
    progress: Progress | None = None,
) -> Scores:
    """Perplexity of both models, mean KL(source || candidate) and top-1 agreement over every predicted token.

    samples   token ids [L] each, at least 2 tokens; every token but the first of a sample is predicted
    cache     what a KV cache makes of keys and values, in the candidate's attention alone
    compare   called after each attention of the candidate, once for every token
    memory    bytes for both models' activations together, and for each block; the rest waits in files of `folder`
    progress  called after each block

    Raises QuantkitError when the models differ in depth or vocabulary, or a sample has nothing to predict.
    """
    if source.num_blocks != candidate.num_blocks:
        raise QuantkitError(
            "source and candidate are not the same model", value=f"{candidate.num_blocks} layers",
            allowed=f"{source.num_blocks}, as the source",
        )  # fmt: skip
    if source.config.vocab_size != candidate.config.vocab_size:
        raise QuantkitError(
            "source and candidate have different vocabularies", value=candidate.config.vocab_size,
            allowed=source.config.vocab_size,
        )  # fmt: skip
    if not samples or min(len(ids) for ids in samples) < 2:
        raise QuantkitError("a sample needs at least 2 tokens: the second is predicted from the first")
    stacked = batches(samples)
    done, total = 0, 2 * source.num_blocks + 1
    with ExitStack() as stack:
        chains = []
        for model in (source, candidate):
            with model.embeddings():
                states = (model.start(ids_NL) for ids_NL in stacked)
                chains.append(stack.enter_context(Activations(states, memory=memory // 2, folder=folder)))
        for index in range(source.num_blocks):
            for model, chain, kv in ((source, chains[0], (None, None)), (candidate, chains[1], (cache, compare))):
                with model.block(index, memory=memory) as block:
                    for i, state in block.run_all(chain, None, *kv):
                        chain[i] = state
                done += 1
                if progress is not None:
                    progress(done, total)
        scores = _compare(source, candidate, zip(stacked, chains[0], chains[1], strict=True))
    if progress is not None:
        progress(total, total)
    return scores


def _compare(source: BlockModel, candidate: BlockModel, final: Iterable[tuple[torch.Tensor, State, State]]) -> Scores:
    """The head of both models, a few tokens at a time."""
    scores = Scores()
    with source.head(), candidate.head():
        for ids_NL, ours, theirs in final:
            for ids_L, a_LD, b_LD in zip(ids_NL, ours.hidden, theirs.hidden, strict=True):
                for at in range(0, len(ids_L) - 1, CHUNK):
                    end = min(at + CHUNK, len(ids_L) - 1)
                    p, q = (
                        m.logits(State(x_LD[None, at:end], s.rest))
                        for m, x_LD, s in ((source, a_LD, ours), (candidate, b_LD, theirs))
                    )
                    scores += compare_logits(p, q, ids_L[at + 1 : end + 1])
    return scores
