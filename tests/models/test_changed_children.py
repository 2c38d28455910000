"""Changed children compute the same as in plain PyTorch: hooks, adapters, parametrisations, pruning, quantisation. Each
treatment is applied to FusedTransformer and to the public architecture in plain modules."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from model_checks import DEVICE, PAD_TRG, VOCAB, Doubled, assert_same_gradients, fused, gold_of, pair
from recorded_graph import recorded_calls  # noqa: F401
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils import weight_norm as old_weight_norm

import fastattn
from fastattn import use_backend
from fastattn.graphs.graphed_call import graphs_of

LINEARS = ("w_qs", "w_ks", "fc", "w_1", "w_2", "trg_word_prj")


class Adapter(nn.Module):
    """The replacement of a linear map in fine-tuning libraries: base(x) + up(down(x)), with the base's weight."""

    def __init__(self, base):
        super().__init__()
        self.base, width = base, base.in_features
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        for parameter in (self.down.weight, self.up.weight):
            nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(parameter)))
        self.to(base.weight.device)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def replace(model, name, make):
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, make(model.get_submodule(name)))


def named(model, *endings):
    """The submodules of these last names in the second layer of each stack, and outside of the layers."""
    chosen = [n for n, _ in model.named_modules() if n.split(".")[-1] in endings and (".1." in n or n.count(".") < 2)]
    return [n for n in chosen if not n.endswith("attention.dropout")]  # called attn_dropout in plain modules


def for_each(treat, *endings):
    def treatment(model):
        for name in named(model, *endings):
            treat(model, name)

    return treatment


def on_module(function, *endings):
    return for_each(lambda model, name: function(model.get_submodule(name)), *endings)


def own_forward(module):
    original = module.forward
    module.forward = lambda *inputs: 0.5 * original(*inputs)


def backward_hook(module):
    module.register_full_backward_hook(lambda module, grads_in, grads_out: (0.5 * grads_in[0],))


def norm_without_affine(model, name):
    replace(model, name, lambda norm: nn.LayerNorm(norm.normalized_shape, eps=1e-6, elementwise_affine=False))


TREATMENTS = {
    "adapter": for_each(lambda model, name: replace(model, name, Adapter), *LINEARS),
    "adapter on w_1 only": for_each(lambda model, name: replace(model, name, Adapter), "w_1"),
    "wrapped norm": for_each(lambda model, name: replace(model, name, Doubled), "layer_norm"),
    "norm without weights": for_each(norm_without_affine, "layer_norm"),
    "rms norm": for_each(
        lambda model, name: replace(model, name, lambda n: nn.RMSNorm(n.normalized_shape, device=DEVICE)), "layer_norm"
    ),
    "dropout replaced": for_each(lambda model, name: replace(model, name, Doubled), "dropout"),
    "attention dropout replaced": for_each(
        lambda model, name: replace(model, name + (".dropout" if name.endswith("attention") else ""), Doubled),
        "attention",
        "attn_dropout",
    ),
    "embedding wrapped": for_each(lambda model, name: replace(model, name, Doubled), "src_word_emb", "trg_word_emb"),
    "positions wrapped": for_each(lambda model, name: replace(model, name, Doubled), "position_enc"),
    "forward hook": on_module(lambda m: m.register_forward_hook(lambda m, i, out: 1.5 * out), *LINEARS, "layer_norm"),
    "forward pre-hook": on_module(lambda m: m.register_forward_pre_hook(lambda m, i: (0.5 * i[0],)), *LINEARS),
    "backward hook": on_module(backward_hook, "w_1", "w_qs"),
    "backward pre-hook": on_module(
        lambda m: m.register_full_backward_pre_hook(lambda m, grads: (0.5 * grads[0],)), "w_1", "w_qs"
    ),
    **{
        f"embedding with {name}": on_module(lambda m, n=name, v=value: setattr(m, n, v), "src_word_emb")
        for name, value in (("scale_grad_by_freq", True), ("max_norm", 0.5), ("sparse", True))
    },
    "own forward": on_module(own_forward, *LINEARS),
    "weight norm": on_module(parametrizations.weight_norm, "w_1", "w_2", "w_qs", "fc"),
    "old weight norm": on_module(old_weight_norm, "w_1", "w_2", "w_qs", "fc"),
    "spectral norm": on_module(parametrizations.spectral_norm, "w_1", "fc"),
    "pruning": on_module(lambda m: prune.l1_unstructured(m, "weight", amount=0.4), *LINEARS[:-1]),
}


def check_equal(ours, theirs, batch):
    """Logits, the loss by `loss` and by logits, and every gradient of it."""
    src, trg = batch
    gold = gold_of(trg)
    torch.manual_seed(7)
    expected_logits = theirs(src, trg)
    # Of logits made again, as ours are for the loss: every forward of a spectral norm changes the next one.
    again = theirs(src, trg)
    expected_loss = F.cross_entropy(again, gold.flatten(), ignore_index=PAD_TRG, label_smoothing=0.1)
    expected_loss.backward()
    torch.manual_seed(7)
    torch.testing.assert_close(ours(src, trg), expected_logits, rtol=0, atol=5e-5)
    loss = ours(src, trg, gold, label_smoothing=0.1)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    loss.backward()
    expected = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    assert_same_gradients({name: p.grad for name, p in ours.named_parameters() if p.requires_grad}, expected, 1e-3)


@pytest.mark.parametrize("treatment", TREATMENTS)
def test_a_changed_child_is_called(treatment, batch):
    models = pair(trg_emb_prj_weight_sharing=treatment != "embedding wrapped")
    for model in models:
        torch.manual_seed(1)
        TREATMENTS[treatment](model)
    check_equal(*models, batch)
    explanation = fastattn.explain(models[0])
    assert explanation.called or treatment == "attention dropout replaced"
    untreated = fastattn.explain(fused())
    assert not untreated.called and not untreated.not_stepped and "everything is fused" in str(untreated)


@pytest.mark.parametrize(
    "treatment", ["adapter", "forward hook", "wrapped norm", "dropout replaced", "embedding wrapped", "pruning"]
)
def test_decoding_calls_a_changed_child(treatment, batch):
    """Each greedy token is the one that plain modules find most likely after those before it."""
    ours, theirs = (model.eval() for model in pair(trg_emb_prj_weight_sharing=treatment != "embedding wrapped"))
    for model in (ours, theirs):
        torch.manual_seed(2)
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                weight.data.copy_(torch.randn(weight.shape))  # drawn on the CPU: the same on every device
        TREATMENTS[treatment](model)
    src = batch[0]
    decoded = fastattn.generate.greedy(ours, src, max_len=8, bos_idx=0, eos_idx=VOCAB - 1)
    assert len({tuple(tokens) for tokens in decoded}) > 1
    for row, tokens in zip(src, decoded, strict=True):
        prefix = torch.tensor([[0, *tokens]], device=row.device)
        with torch.no_grad():
            likely = theirs(row[None], prefix).argmax(-1).tolist()
        assert likely[: len(tokens)] == tokens


def with_bias(old):
    new = nn.Linear(old.in_features, old.out_features, device=DEVICE)
    new.weight = old.weight
    nn.init.normal_(new.bias, generator=torch.Generator(DEVICE).manual_seed(old.out_features))
    return new


@pytest.mark.parametrize("way", ["aten", "op by op", pytest.param("reference", marks=pytest.mark.full)])
@pytest.mark.parametrize("maps", ["w_qs", "w_ks", "w_vs", "w_ks w_vs", "fc", "w_qs w_ks w_vs fc", "trg_word_prj"])
def test_a_bias_counts_everywhere(maps, way, batch):
    """Of maps that have none as they are: in logits, in the loss, in gradients, and in steps of decoding. The maps are
    those of every second layer; keys and values of all layers are one product."""
    models = pair()
    for model in models:
        for_each(lambda model, name: replace(model, name, with_bias), *maps.split())(model)
    ours, theirs = models
    if way == "op by op":
        for layer in (*ours.encoder.layer_stack, *ours.decoder.layer_stack):
            layer.pos_ffn.dropout.register_forward_hook(lambda *_: None)
    for model in models:
        for name, bias in model.named_parameters():
            bias.requires_grad_(not name.endswith("w_ks.bias"))  # it moves all scores of a query by the same number
    with use_backend("reference" if way == "reference" else "aten"):
        check_equal(ours, theirs, batch)
        src, trg = batch[0], torch.randint(3, VOCAB, (3, 6), device=DEVICE)
        cache = ours.eval().start_decoding(src, 1, 6)
        with torch.no_grad():
            steps = torch.cat([ours.next_logits(trg[:, n : n + 1], cache) for n in range(6)], 1)
        torch.testing.assert_close(steps.flatten(0, 1), theirs(src, trg), rtol=0, atol=5e-5)
    assert cache.steps.is_straight == (way == "aten" and DEVICE == "cpu")


def test_explain_of_other_modules():
    assert "fused" not in str(fastattn.explain(nn.Linear(3, 3)))
    assert str(fastattn.explain(nn.Sequential(fused()))) == "Sequential: everything is fused"


@pytest.mark.parametrize("make", [fused, lambda: nn.Linear(3, 3).to(DEVICE)])
@pytest.mark.usefixtures("recorded_calls")
def test_explain_of_graphs(make):
    """Also of a model without a module of fastattn, as an accelerated one."""
    model, x = make(), torch.ones(2, 3, device=DEVICE)
    before = str(fastattn.explain(model))

    def call(module, x):
        return x * next(module.parameters()).sum()

    for _ in range(4):
        graphs_of(model)(model, call, (x,), {}).sum().backward()
    with torch.no_grad():
        graphs_of(model)(model, call, (x,), {})
    explanation = fastattn.explain(nn.Sequential(model))
    assert "graphs" not in before and explanation.graphs.replays == 2
    (line,) = (line for line in str(explanation).splitlines() if line.startswith("CUDA graphs of Sequential: "))
    assert re.search(r": 1 captures, 2 replays, [1-9]\d* MiB$", line)
    assert str(explanation).endswith("\n  eager calls: 2, a new shape\n  eager calls: 1, no gradient is recorded")
    assert "reads no others" not in str(explanation)


def test_explain_names_the_child_and_the_reason():
    model = fused()
    replace(model, "encoder.layer_stack.0.pos_ffn.w_1", Adapter)
    model.decoder.layer_stack[1].enc_attn.layer_norm.register_forward_hook(lambda *call: None)
    model.decoder.register_forward_hook(lambda *call: None)
    explanation = fastattn.explain(model)
    assert explanation.called == {
        "encoder.layer_stack.0.pos_ffn.w_1": f"is a {__name__}.Adapter",
        "decoder.layer_stack.1.enc_attn.layer_norm": "has forward hooks",
    }
    assert explanation.not_stepped == {"decoder": "has forward hooks"}
    assert "encoder.layer_stack.0.pos_ffn.w_1 is a" in str(explanation)
    with pytest.raises(TypeError, match="no further arguments"):
        fastattn.explain(model, backend="aten")


def test_global_hooks_see_every_module(batch):
    """A hook on all modules of the process, as profilers use it, is called for modules that the ops would replace."""
    models, seen = pair(), []
    for model in models:
        names = {module: name for name, module in model.named_modules()}
        called = set()
        handle = nn.modules.module.register_module_forward_hook(lambda m, *io, n=names, c=called: c.add(n.get(m)))  # noqa: B023
        try:
            model(*batch)
        finally:
            handle.remove()
        seen.append({n for n in called if n and n.split(".")[-1] in (*LINEARS, "w_vs", "layer_norm", "src_word_emb")})
    assert seen[0] == seen[1] and len(seen[0]) > 40


def test_hooks_see_padded_shapes(batch):
    """`loss` drops padding automatically on a CPU, but not where a hook would see it."""
    model, (src, trg), shapes = fused().eval(), batch, []
    src, trg = src[1:], trg[1:]
    gold = gold_of(trg)
    plain_loss = model.loss(src, trg, gold)
    model.encoder.layer_stack[0].register_forward_hook(lambda m, i, out: shapes.append(out[0].shape))
    torch.testing.assert_close(model.loss(src, trg, gold), plain_loss)
    assert shapes == [(*src.shape, model.d_model)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_dynamic_quantisation(batch):
    models = [torch.ao.quantization.quantize_dynamic(m.eval().cpu(), {nn.Linear}, torch.qint8) for m in pair()]
    assert type(models[0].encoder.layer_stack[0].pos_ffn.w_1) is not nn.Linear
    src, trg = (t.cpu() for t in batch)
    logits, expected = (model(src, trg) for model in models)
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-2 * expected.abs().max().item())
    gold = gold_of(trg)
    by_logits = F.cross_entropy(logits, gold.flatten(), ignore_index=PAD_TRG)
    torch.testing.assert_close(models[0].loss(src, trg, gold), by_logits)


def test_peft_lora_trains_as_on_plain_modules(batch):
    """Every adapter gets its gradient through `loss`, and 20 steps equal those of plain modules."""
    peft = pytest.importorskip("peft")
    src, trg = batch
    gold, losses = gold_of(trg), []
    config = peft.LoraConfig(r=3, target_modules=["w_qs", "w_1", "w_2", "fc", "trg_word_prj"], lora_dropout=0.0)
    ours, theirs = (peft.inject_adapter_in_model(copy.deepcopy(config), m) for m in pair())
    ours.load_state_dict(theirs.state_dict())
    for model in (ours, theirs):
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=1e-2)
        losses.append([])
        for _ in range(20):
            if model is ours:
                loss = model.loss(src, trg, gold, 0.1)
            else:
                loss = F.cross_entropy(model(src, trg), gold.flatten(), ignore_index=PAD_TRG, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            assert all(p.grad is not None for p in trained)
            optimizer.step()
            losses[-1].append(loss.item())
        assert len(trained) == 2 * (2 * (3 + 2 + 2 + 3) + 1)  # of two layers in each stack, and the projection
        assert losses[-1][-1] < losses[-1][0]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-4, atol=0)
