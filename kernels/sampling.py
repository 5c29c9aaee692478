"""Token sampling in PyTorch: grammar mask, temperature, min_p, top_k and top_p, then one token by Gumbel noise.

Selection depends on values alone, so ties at a boundary are kept together and no device's sort order matters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.kernels.gumbel_noise import gumbel, gumbel_at
from kvferry.kernels.token_masks import Masks, keep_only
from kvferry.protocol.sampling import SamplingParams

NO_TOKEN = -1
"""Drawn from a row that has a NaN, or whose largest logit is not finite."""
_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""
_BOUNDS = (256, 4096)
"""How many of the most likely tokens are ranked, one bound after the other, before the whole vocabulary is sorted."""


@dataclass(frozen=True, slots=True)
class NoiseKeys:
    """Seed of each row's request, and the position of the token to draw."""

    seeds: tuple[int, ...]
    positions: tuple[int, ...]

    def pick(self, rows: Sequence[int]) -> NoiseKeys:
        """Return the keys of these rows."""
        return NoiseKeys(tuple(self.seeds[i] for i in rows), tuple(self.positions[i] for i in rows))


def is_greedy(params: SamplingParams) -> bool:
    """Return whether the most likely token is drawn."""
    return params.temperature < _GREEDY_BELOW


def draw(logits: torch.Tensor, params: Sequence[SamplingParams], keys: NoiseKeys, masks: Masks = ()) -> torch.Tensor:
    """`Ops.draw` in PyTorch for all rows at once.

    It waits for the device only to check whether enough tokens were ranked."""
    keep_only(logits, masks)
    random = [i for i, p in enumerate(params) if not is_greedy(p)]
    if not random:
        return _most_likely(logits)
    if len(random) == len(params):
        return _draw_random(logits, params, keys)
    drawn = _most_likely(logits)
    drawn[random] = _draw_random(logits[random], [params[i] for i in random], keys.pick(random))
    return drawn


def _draw_random(logits: torch.Tensor, params: Sequence[SamplingParams], keys: NoiseKeys) -> torch.Tensor:
    sound = logits.amax(dim=-1).isfinite()
    return torch.where(sound, _draw(logits, params, keys), NO_TOKEN)


def _draw(logits: torch.Tensor, params: Sequence[SamplingParams], keys: NoiseKeys) -> torch.Tensor:
    logits /= torch.tensor([p.temperature for p in params], device=logits.device)[:, None]
    if any(p.min_p > 0.0 for p in params):
        _mask_min_p(logits, params)
    cut = [i for i, p in enumerate(params) if _truncates(p, logits.shape[1])]
    whole = [i for i in range(len(params)) if i not in set(cut)]
    if not cut:
        return _argmax_with_noise(logits, keys)
    drawn = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    drawn[cut] = _draw_truncated(logits[cut], [params[i] for i in cut], keys.pick(cut))
    if whole:
        drawn[whole] = _argmax_with_noise(logits[whole], keys.pick(whole))
    return drawn


def _most_likely(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's largest value, the first of equals, or NO_TOKEN: int64 [n].

    On a CPU NumPy finds it ten times faster than PyTorch."""
    found = _first_largest(logits)
    largest = logits.gather(1, found[:, None])[:, 0]
    return torch.where(largest.isfinite(), found, NO_TOKEN)


def _first_largest(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's largest value, the first of equals; a NaN counts as the largest."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def _truncates(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1.0 or 0 < params.top_k < vocab_size


def _argmax_with_noise(logits: torch.Tensor, keys: NoiseKeys) -> torch.Tensor:
    noise = gumbel(keys.seeds, keys.positions, logits.shape[1], logits.device)
    return _first_largest(noise.add_(logits))


def _mask_min_p(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Forbid tokens less likely than min_p times the most likely one (Nguyen et al., arXiv 2407.01082)."""
    floor = torch.tensor([p.min_p for p in params], device=logits.device).log_()
    floor += logits.amax(dim=-1)
    logits.masked_fill_(logits < floor[:, None], -torch.inf)


def _draw_truncated(logits: torch.Tensor, params: Sequence[SamplingParams], keys: NoiseKeys) -> torch.Tensor:
    """Draw among the kept tokens only, looking at as few of the most likely ones as each row needs."""
    drawn = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    vocab_size = logits.shape[1]
    rows = list(range(len(params)))
    for bound in (*(b for b in _BOUNDS if b < vocab_size), vocab_size):
        part = logits if len(rows) == len(params) else logits[rows]
        ranked = part.topk(bound) if bound < vocab_size else part.sort(dim=-1, descending=True)
        kept, found = _kept(ranked.values, part, [params[i] for i in rows])
        some = keys.pick(rows)
        noise = gumbel_at(some.seeds, some.positions, ranked.indices)
        best = noise.add_(ranked.values).masked_fill_(~kept, -torch.inf).argmax(dim=-1, keepdim=True)
        winners = ranked.indices.gather(1, best).squeeze(1)
        done = found.tolist()
        drawn[[i for i, ok in zip(rows, done, strict=True) if ok]] = winners[found]
        rows = [i for i, ok in zip(rows, done, strict=True) if not ok]
        if not rows:
            break
    return drawn


def _kept(
    values: torch.Tensor, logits: torch.Tensor, params: Sequence[SamplingParams]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which ranked values survive top_k and then top_p, and which rows are complete.

    values: [n, bound], descending; the first result has their shape, bool. A row (bool [n]) is complete if no token
    beyond the bound can survive. top_k keeps the k most likely. top_p keeps every token for which the more likely ones,
    after top_k and renormalised, have less than p together (Holtzman et al., arXiv 1904.09751)."""
    bound, vocab_size = values.shape[1], logits.shape[1]
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], device=values.device)
    kth = values.gather(1, top_k.clamp(max=bound)[:, None] - 1)
    kth.masked_fill_((top_k > bound)[:, None], -torch.inf)
    threshold = kth
    if any(p.top_p < 1.0 for p in params):
        top_p = torch.tensor([p.top_p if p.top_p < 1.0 else torch.inf for p in params], device=values.device)
        kept = values >= kth
        total = values.masked_fill(~kept, -torch.inf).logsumexp(dim=-1)
        if any(not 0 < p.top_k <= bound for p in params):
            total = torch.where(top_k <= bound, total, logits.logsumexp(dim=-1))
        mass = (values - total[:, None]).exp_().masked_fill_(~kept, 0.0)
        more_likely = mass.cumsum(dim=-1) - mass
        count = (kept & (more_likely < top_p[:, None])).sum(dim=-1, keepdim=True)
        threshold = values.gather(1, count.clamp(min=1) - 1)
    last = values[:, -1]
    found = (threshold[:, 0] > last) | (last == -torch.inf)
    return values >= threshold, found if bound < vocab_size else torch.ones_like(found)
