"""Faults in fastattn/check and in the choice of backends."""

from planted.fault import Fault

TOLERANCE, SHADOW, DOCTOR = (f"fastattn/check/{name}.py" for name in ("tolerance", "shadow", "doctor"))
CHOICE, MATMUL = "fastattn/backends/choice.py", "fastattn/backends/cpu_matmul.py"
JUDGE, WATCHED = "tests/check/test_doctor.py -k judge", "tests/check/test_shadow.py"
EXAMINED, CHOSEN = "tests/check/test_doctor.py -k names_a_backend", "tests/backends/test_choice.py"
STEPS = f"{WATCHED} -k steps_and"
RULE, PRODUCTS = "tests/backends/test_rule.py", "tests/backends/test_cpu_matmul.py"

FAULTS: list[Fault] = [
    Fault("64 roundings of a term for 8", TOLERANCE,
        "(1 if finfo.bits == 16 else 8)", "(1 if finfo.bits == 16 else 64)", JUDGE),
    Fault("the largest element alone", TOLERANCE, "for size in (torch.max, _rms))", "for size in (torch.max,))", JUDGE),
    Fault("the wrong infinity passes", TOLERANCE, "(infinite & (actual != rounded)).any() or ", "", JUDGE),
    Fault("no partial sums", TOLERANCE, "or 0 not in dims or x.numel() == 0", "or True",
        "tests/check/test_doctor.py -k rounding_scale"),
    Fault("shadow compares every step", SHADOW, "if self.steps % self.every == 0", "if self.steps % 1 == 0", STEPS),
    Fault("a step of another model's optimizer counts", SHADOW,
        "if any(id(p) in self._parameters for", "if any(True for", STEPS),
    Fault("shadow compares without gradients", SHADOW,
        "if any(learns):", "if False:", f"{WATCHED} -k 'fault and aten'"),
    Fault("relu's band 1000 times as wide", SHADOW,
        "rounding = 4 * torch.finfo(torch.float32).eps", "rounding = 4000 * torch.finfo(torch.float32).eps",
        f"{WATCHED} -k relu"),
    Fault("the comparison takes a random number of the run", SHADOW,
        "generator = torch.Generator(t.device).manual_seed(0)", "generator = torch.default_generator",
        f"{WATCHED} -k 'stays_as_it_was and aten'"),
    Fault("the doctor's exit status", DOCTOR, 'return 0 if report["ok"] else 1', "return 0", EXAMINED),
    Fault("the doctor loses the failed backends", DOCTOR,
        'yield record | {"failed": _format_error(error), "ok": False}', "pass", EXAMINED),
    Fault("the environment before use_backend", CHOICE,
        "    if name is not None:\n        return name, \"use_backend()\"\n    if text and (name := _in_environment",
        "    if text and (name := _in_environment", CHOSEN),
    Fault("the environment's other ops count", CHOICE,
        "if op == op_name or (not separator and found is None):", "if op == op_name or found is None:", CHOSEN),
    Fault("a request that cannot be met is forgotten", CHOICE,
        "if not reason.startswith(NO_KERNEL):", "if False:", CHOSEN),
    Fault("a nested use_backend ends all", CHOICE, "before = _task_override.get()", "before = None", CHOSEN),
    Fault("dropout counts as a mask on Hopper", CHOICE, "Lk > 64 and dropout_p > 0", "Lk > 64 and dropout_p < 0", RULE),
    Fault("bits that change under deterministic algorithms", CHOICE,
        "is_plain = is_plain and not torch.are_deterministic_algorithms_enabled()", "pass", RULE),
    Fault("oneDNN's gradient of the weight transposed", MATMUL,
        "mm(dout.t(), x) if needs_dweight", "mm(x.t(), dout).t() * 2 if needs_dweight", PRODUCTS),
    Fault("oneDNN for small products", MATMUL, "and x.numel() * weight.shape[0] >= MIN_WORK", "", PRODUCTS),
]  # fmt: skip
