"""Faults in fastattn/graphs."""

from planted.fault import Fault

CALL, STEP = "fastattn/graphs/graphed_call.py", "fastattn/graphs/training_step.py"
FINGERPRINT, CAPTURE = "fastattn/graphs/fingerprint.py", "fastattn/graphs/capture.py"
DIVIDE = """        if self.accumulate > 1:
            torch._foreach_div_(list(gradients.values()), self._tokens.clamp(min=1).float())
            self._tokens.zero_()
"""
CLIP = """        if self.max_grad_norm is not None:
            self.grad_norm.copy_(nn.utils.clip_grad_norm_(list(gradients), self.max_grad_norm))
"""

FAULTS: list[Fault] = [
    Fault("a second group has the rate of the first", STEP,
        'torch.as_tensor(group["lr"])', 'torch.as_tensor(groups[0]["lr"])',
        "tests/graphs/test_training_step.py -k clipped"),
    Fault("clipped before divided by tokens", STEP,
        f"{DIVIDE}{CLIP}", f"{CLIP}{DIVIDE}", "tests/graphs/test_training_step.py -k accumulated"),
    Fault("accumulated batches count the same", STEP,
        "captured.doutputs[0].copy_(tokens) if self.accumulate > 1 else captured.doutputs[0].fill_(1)",
        "captured.doutputs[0].fill_(1)", "tests/graphs/test_training_step.py -k accumulated"),
    Fault("sums are not cleared", STEP,
        "torch._foreach_zero_(list(gradients.values()))", "pass", "tests/graphs/test_training_step.py -k accumulated"),
    Fault("an optimizer's new settings are not seen", STEP,
        "frozen = [graphs, id(state), len(state), settings]", "frozen = [graphs, id(state), len(state)]",
        "tests/graphs/test_changes.py -k betas"),
    Fault("the evaluation mode is not seen", FINGERPRINT,
        'kind.forward, own["training"]', "kind.forward", "tests/graphs/test_changes.py -k 'evaluation and not own'"),
    Fault("a frozen parameter is not seen", FINGERPRINT, "t.requires_grad, ", "",
        "tests/graphs/test_changes.py -k 'norm and frozen'"),
    Fault("new memory of a weight is not seen", FINGERPRINT,
        "parts += id(t), t.data_ptr()", "parts += id(t), 0",
        "tests/graphs/test_changes.py -k 'new and memory and not own'"),
    Fault("a buffer is not seen", FINGERPRINT,
        'for tensors in (own["_parameters"], own["_buffers"]):', 'for tensors in (own["_parameters"],):',
        "tests/graphs/test_changes.py -k buffer"),
    Fault("a config is not seen", FINGERPRINT,
        "parts.append(value_fingerprint({k: v for k, v in own.items() if k not in _SAVED}))", "pass",
        "tests/graphs/test_changes.py --full -k config"),
    Fault("a graph of another backend", FINGERPRINT, "        request_of_all_ops(),\n", "",
        "tests/graphs/test_graphed_call.py -k 'around and backend'"),
    Fault("results in the graph's memory", CALL,
        "return t[part].clone(memory_format=torch.contiguous_format)", "return t[part]",
        "tests/graphs/test_graphed_call.py -k belong"),
    Fault("gradients in the graph's memory", CALL,
        "{dtype: flat.clone() for dtype, flat in self._flat_gradients.items()}", "dict(self._flat_gradients)",
        "tests/graphs/test_graphed_call.py -k belong"),
    Fault("a parameter changed before its backward", CALL,
        "return sum([p._version for p in self._read])", "return 0",
        "tests/graphs/test_graphed_call.py -k weight_changed"),
    Fault("a second forward in the memory of the first", CALL,
        "if reason is None and self._pending() is not None:", "if False:",
        "tests/graphs/test_graphed_call.py -k two_forwards"),
    Fault("a shorter batch keeps the end of a longer one", CALL,
        "static.fill_(fill)[tuple", "static[tuple", "tests/graphs/test_graphed_call.py -k shorter_batch"),
    Fault("padding has gradients of an earlier batch", CALL,
        "                    static.zero_()", "                    pass",
        "tests/graphs/test_graphed_call.py -k shorter_batch"),
    Fault("a captured backward under autocast", CALL,
        "with torch.autocast(device.type, enabled=False):  # where users call backward()",
        "with torch.autocast(device.type, enabled=torch.is_autocast_enabled(device.type)):",
        "tests/graphs/test_graphed_call.py -k captured_backward"),
    Fault("a capture draws dropout of the user's", CALL,
        'with without_autocast_cache(), torch.random.fork_rng([device] if device.type == "cuda" else []):',
        "with without_autocast_cache():", "tests/graphs/test_graphed_call.py -k 'around and autocast'"),
    Fault("another thread replays", CALL, "place = modes(device), threading.get_ident()", "place = modes(device), 0",
        "tests/graphs/test_graphed_call.py -k thread"),
    Fault("a failed capture keeps its pool", CAPTURE,
        "self._graphs.clear()  # another pool", "pass  # another pool", "tests/graphs/test_capture.py"),
    Fault("casts of older weights in a graph", CAPTURE,
        "torch.set_autocast_cache_enabled(False)", "pass", "tests/graphs/test_training_step.py -k bfloat16"),
    Fault("a wrong call that is repeated is captured", "fastattn/graphs/graphed_call.py",
        "            self._seen[self._last] = 0  # a wrong call that is repeated is never captured\n", "",
        "tests/integrations/test_graphs.py -k wrong_call"),
]  # fmt: skip
