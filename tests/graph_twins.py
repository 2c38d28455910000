"""Twins: a model that uses CUDA graphs and its copy that does not; and the changes of a model after a capture."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from model_checks import DEVICE, NO_DROPOUT, PAD_TRG, TINY, batch, fused
from recorded_graph import decoding_as_on_a_gpu
from torch import Tensor, nn

from fastattn import FusedTransformer, GraphedStep, generate
from fastattn.graphs import Stats, stats
from fastattn.graphs.capture import WARM_UP, without_autocast_cache
from fastattn.graphs.graphed_call import EAGER


def small(**changes: Any) -> FusedTransformer:
    torch.manual_seed(3)
    return fused(**TINY | NO_DROPOUT | changes)


def a_weight(model: nn.Module) -> Tensor:
    return model.decoder.layer_stack[0].pos_ffn.w_1.weight


def loss_of(model: nn.Module, src: Tensor, trg: Tensor, gold: Tensor, smoothing: float = 0.0) -> Tensor:
    return model(src, trg, gold, smoothing)


def own_loss_of(model: nn.Module, src: Tensor, trg: Tensor, gold: Tensor, smoothing: float = 0.0) -> Tensor:
    """The user's own, of the logits."""
    logits = model(src, trg).float()
    return nn.functional.cross_entropy(logits, gold.flatten(), ignore_index=PAD_TRG, label_smoothing=smoothing)


class Twins:
    """until_replay: calls of a shape until all graphs are replayed.     graphs: how many a shape then has."""

    until_replay = graphs = 0

    def __init__(self, model: nn.Module, plain: nn.Module | None = None) -> None:
        self.model, self.plain = model, plain or copy.deepcopy(model)
        self.both = self.model, self.plain

    def change(self, apply: Callable[[Any, Any], Any]) -> None:
        for model in self.both:
            apply(model, None)

    def check(self, seed: int, *shape: int) -> None:
        """One call of both, of an own batch: the same numbers."""
        raise NotImplementedError

    def capture(self, *shape: int) -> Any:
        for seed in range(self.until_replay):
            self.check(seed, *shape)
        return self

    @property
    def stats(self) -> Stats:
        return stats(self.model)


class Calls(Twins):
    """A model with graphs=True in the user's loop.     loss: the model's, or the user's own of its logits."""

    until_replay, graphs = EAGER + 1, 2

    def __init__(self, loss: Callable[..., Tensor] = loss_of, model: nn.Module | None = None, **changes: Any) -> None:
        super().__init__(model or small(**changes))
        self.model.graphs, self.loss = True, loss

    def check(self, seed: int, *shape: int) -> None:
        losses = []
        for m in self.both:
            m.zero_grad()
            losses.append(self.loss(m, *batch(seed, *shape)))
            losses[-1].backward()
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        self.check_gradients()

    def check_gradients(self, atol: float = 2e-6) -> None:
        for (name, p), q in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                message = f"{name}: {{}}".format
                torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=atol, equal_nan=True, msg=message)


def adam(model: nn.Module, **changes: Any) -> torch.optim.Optimizer:
    """Its update is smooth where gradients are small. Two groups, as with and without weight decay."""
    groups = [{"params": list(model.parameters())[i::2]} for i in range(2)]
    return torch.optim.Adam(groups, **dict(lr=1.0, eps=1.0, fused=True, capturable=True) | changes)


class Steps(Twins):
    """A model with GraphedStep, and the same model in a plain loop.     of_step: what its steps are called with."""

    until_replay, graphs = EAGER + WARM_UP + 1, 3

    def __init__(
        self,
        model: nn.Module | None = None,
        plain: nn.Module | None = None,
        of_step: dict[str, Any] | None = None,
        lr: float = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(small() if model is None else model, plain)
        self.of_step = of_step or {}
        self.optimizers = [adam(m, lr=lr) for m in self.both]
        self.step = GraphedStep(self.model, self.optimizers[0], **options)
        next(self.model.parameters()).grad = torch.ones_like(next(self.model.parameters()))  # what is left: no part

    def change(self, apply: Callable[[Any, Any], Any]) -> None:
        for model, optimizer in zip(self.both, self.optimizers, strict=True):
            apply(model, optimizer)

    def plain_loss(self, given: Any) -> Tensor:
        return self.plain.loss(*given, **self.of_step)

    def tokens(self, given: Any) -> Tensor:
        return (given[2] != PAD_TRG).sum()

    def check(self, seed: int, *shape: int) -> None:
        self.update([batch(seed + i, *shape) for i in range(self.step.accumulate)])

    def update(self, batches: list[Any], tolerance: float = 1e-4) -> None:
        """By both: the same losses, norms and weights."""
        counts = [self.tokens(given) for given in batches]
        for given, count in zip(batches, counts, strict=True):
            named = given if isinstance(given, dict) else {}
            loss = self.step(*(() if named else given), **named, **self.of_step)
            assert loss.dtype == torch.float32 and loss.shape == () and not loss.requires_grad
            if not count:
                assert loss == 0
                continue
            with without_autocast_cache():
                expected = self.plain_loss(given)
            torch.testing.assert_close(loss, expected.detach(), rtol=tolerance, atol=1e-6)
            (expected * count / sum(counts)).backward()
        if self.step.max_grad_norm:
            norm = nn.utils.clip_grad_norm_(self.plain.parameters(), self.step.max_grad_norm)
            assert norm > self.step.max_grad_norm
            torch.testing.assert_close(self.step.grad_norm, norm, rtol=1e-3, atol=0)
        before = [p.detach().clone() for p in self.plain.parameters()]
        self.optimizers[1].step()
        self.plain.zero_grad()
        assert max((p - q).abs().max() for p, q in zip(before, self.plain.parameters(), strict=True)) > 1e-4
        for p, q in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=tolerance)
            assert p.grad is None


class Searches(Twins):
    """A model that is decoded as on a GPU, and its copy that is decoded as on a CPU, or on a GPU by its own graphs."""

    until_replay, graphs = 1, 1 if DEVICE == "cpu" else 2

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__((small(n_layers=2) if model is None else model).eval())

    def check(self, seed: int, *shape: int) -> None:
        limits = {"max_len": 12, "bos_idx": 3, "eos_idx": 4}
        src_seq = batch(seed, *shape)[0]
        with decoding_as_on_a_gpu():
            found = generate.greedy(self.model, src_seq, **limits)
        assert found == generate.greedy(self.plain, src_seq, **limits)


# --- what changes need another graph ----------------------------------------------------------------------------------


class UsersTransformer(FusedTransformer):
    """A user's class."""


def model_to_change() -> FusedTransformer:
    """The encoder's layers are a, b, a."""
    model = small(trg_emb_prj_weight_sharing=False, emb_src_trg_weight_sharing=False)
    layers = model.encoder.layer_stack
    layers.append(fused(**TINY | NO_DROPOUT).encoder.layer_stack[0])
    layers.append(layers[0])
    return model


def _freeze(model: nn.Module, but: str | tuple[str, ...]) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(but))


def _negate_moments(_: Any, optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for moments in state["state"].values():
        moments["exp_avg"].mul_(-1)
    optimizer.load_state_dict(state)


def _move_to_a_new_group(_: Any, optimizer: Any) -> None:
    optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "lr": 0.1})


class Change(NamedTuple):
    """What follows from a change: graphs are "kept", "captured", or why calls are eager.

    users: whose graphs; c: calls in any loop, s: GraphedStep, o: of its optimizer alone, d: decoding, h: of a model of
    transformers.
    A graph of decoding that could not be kept is captured at each search.
    """

    effect: str
    users: str
    apply: Callable[[Any, Any], Any]


def _child(m: Any) -> Any:
    return m.decoder.layer_stack[0].pos_ffn


def _replace_bias(linear: nn.Linear) -> None:
    linear.bias = nn.Parameter(linear.bias.detach().flip(0))


# fmt: off
CHANGES = {
    "weights in place": Change(
        "kept", "csdh", lambda m, _: m.load_state_dict({name: 1.1 * t for name, t in m.state_dict().items()})),
    "buffer in place": Change("kept", "csd", lambda m, _: m.encoder.position_enc.pos_table.mul_(0.5)),
    "new memory": Change("captured", "csd", lambda m, _: [setattr(p, "data", p.data * 0.8) for p in m.parameters()]),
    "new memory of a norm": Change(
        "captured", "csd", lambda m, _: setattr(m.decoder.layer_norm.bias, "data", m.decoder.layer_norm.bias + 0.5)),
    "encoder frozen": Change("captured", "csd", lambda m, _: _freeze(m, but=("decoder", "trg_word_prj"))),
    "norm frozen": Change("captured", "csd", lambda m, _: m.decoder.layer_norm.weight.requires_grad_(False)),
    "activation": Change("captured", "csd", lambda m, _: setattr(_child(m), "activation", "gelu")),
    "evaluation": Change("captured", "cs", lambda m, _: m.eval()),
    "layer shared": Change(
        "captured", "csd", lambda m, _: m.encoder.layer_stack.__setitem__(-1, m.encoder.layer_stack[1])),
    "buffer": Change("captured", "csd", lambda m, _: setattr(
        m.encoder.position_enc, "pos_table", m.encoder.position_enc.pos_table / 2)),
    "float64": Change("captured", "cdh", lambda m, _: m.double()),
    "a forward hook": Change(
        "hook", "csd", lambda m, _: _child(m).register_forward_hook(lambda module, given, out: out * 2)),
    "a backward hook": Change(
        "hook", "csd", lambda m, _: m.encoder.layer_norm.register_full_backward_hook(lambda *call: None)),
    "a user's class": Change(
        "UsersTransformer is a class", "csd", lambda m, _: setattr(m, "__class__", UsersTransformer)),
    "a map's bias": Change("captured", "h", lambda m, _: _replace_bias(m.model.decoder.layers[0].self_attn.v_proj)),
    "config": Change("captured", "h", lambda m, _: setattr(m.config, "scale_embedding", not m.config.scale_embedding)),
    "a hook of the head": Change(
        "hook", "h", lambda m, _: m.lm_head.register_forward_hook(lambda module, given, out: out.roll(1, -1))),
    "a method of the object": Change("next_logits set", "h", lambda m, _: setattr(m, "next_logits", m.next_logits)),
    "rate": Change("kept", "o", lambda _, o: o.param_groups[1].update(lr=0.3)),
    "betas": Change("captured", "o", lambda _, o: o.param_groups[0].update(betas=(0.5, 0.6))),
    "optimizer's state": Change("captured", "o", _negate_moments),
    "a group more": Change("captured", "o", _move_to_a_new_group),
}
# fmt: on
