"""How far a candidate's predictions are from its source's: perplexity, KL divergence, top-1 agreement.

Per token that has a next one, in nats: `-log p(next)` of both, and KL(source || candidate) over the whole vocabulary.
Logits and log-softmax are float32, sums float64. Small numbers that can be added up, so a text is cut as one likes.

Letters: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

CHUNK = 128  # tokens whose log-probabilities are in memory at once: 25 MB for a vocabulary of 49,152


@dataclass(frozen=True, slots=True)
class Scores:
    """Sums over `tokens` predictions; `agree` counts those whose most likely token is the same."""

    tokens: int = 0
    nll_source: float = 0.0
    nll_candidate: float = 0.0
    kl_sum: float = 0.0
    agree: int = 0

    def __add__(self, other: Scores) -> Scores:
        return Scores(
            self.tokens + other.tokens,
            self.nll_source + other.nll_source,
            self.nll_candidate + other.nll_candidate,
            self.kl_sum + other.kl_sum,
            self.agree + other.agree,
        )

    @property
    def perplexity_source(self) -> float:
        """`exp` of the mean negative log-likelihood; NaN without tokens."""
        return math.exp(self.nll_source / self.tokens) if self.tokens else math.nan

    @property
    def perplexity_candidate(self) -> float:
        """`exp` of the mean negative log-likelihood; NaN without tokens."""
        return math.exp(self.nll_candidate / self.tokens) if self.tokens else math.nan

    @property
    def kl(self) -> float:
        """Mean KL(source || candidate) per token, in nats; NaN without tokens."""
        return self.kl_sum / self.tokens if self.tokens else math.nan

    @property
    def top1(self) -> float:
        """Share of tokens on which both find the same most likely; NaN without tokens."""
        return self.agree / self.tokens if self.tokens else math.nan


def compare_logits(source_TV: torch.Tensor, candidate_TV: torch.Tensor, next_T: torch.Tensor) -> Scores:
    """Scores of predictions: float32 logits of both models and the token ids that came next."""
    scores = Scores()
    for at in range(0, len(next_T), CHUNK):
        p_TV = torch.log_softmax(source_TV[at : at + CHUNK], -1)
        q_TV = torch.log_softmax(candidate_TV[at : at + CHUNK], -1)
        ids_T1 = next_T[at : at + CHUNK, None].to(p_TV.device)
        agree = p_TV.max(-1)[1].eq(q_TV.max(-1)[1]).sum()  # six times as fast as argmax
        nll_p, nll_q = (-x.gather(1, ids_T1).double().sum() for x in (p_TV, q_TV))
        q_TV.neg_().add_(p_TV)  # log p - log q
        impossible = p_TV.exp_().eq(0)  # 0 log 0 = 0
        kl = q_TV.mul_(p_TV).masked_fill_(impossible, 0).sum(-1).double().sum()
        scores += Scores(len(ids_T1), nll_p.item(), nll_q.item(), kl.item(), int(agree.item()))
    return scores
