import pytest
import torch

from sextet.dapo import logprob
from sextet.dapo.logprob import token_scores


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [64, 2**23])
def test_scores_and_gradients_are_those_of_plain_logits(monkeypatch, temperature, chunk):
    monkeypatch.setattr(logprob, "CHUNK", chunk)
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 8, generator=rng, dtype=torch.float64).requires_grad_()
    head = torch.randn(11, 8, generator=rng, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 11, (23,), generator=rng)
    a, b = torch.randn(2, 23, generator=rng)

    def gradients(logp, entropy):
        (a * logp + b * entropy).sum().backward()
        found = hidden.grad, head.grad
        hidden.grad = head.grad = None
        return found

    logits = (hidden @ head.T / temperature).log_softmax(-1)
    logp, entropy = logits.gather(1, targets[:, None])[:, 0], -(logits.exp() * logits).sum(-1)
    expected = gradients(logp, entropy)
    found_logp, found_entropy = token_scores(hidden, head, targets, temperature)
    torch.testing.assert_close(found_logp, logp.float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(found_entropy, entropy.float(), atol=1e-5, rtol=0)
    for found, right in zip(gradients(found_logp, found_entropy), expected, strict=True):
        torch.testing.assert_close(found, right, atol=1e-4, rtol=1e-4)


def test_few_logits_are_kept_at_a_time():
    """4,096 tokens over 49,152 ids: the logits alone would be 805 MB."""
    import resource

    hidden = torch.randn(4096, 64).requires_grad_()
    head = torch.randn(49152, 64).requires_grad_()
    targets = torch.randint(0, 49152, (4096,))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    logp, _ = token_scores(hidden, head, targets)
    logp.sum().backward()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown <= 300, f"{grown:.0f} MB"
