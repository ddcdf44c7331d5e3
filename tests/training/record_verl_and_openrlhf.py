"""Record what verl's and OpenRLHF's own functions give, for ``test_beside_verl_and_openrlhf.py``.

    python tests/training/record_verl_and_openrlhf.py FOLDER

FOLDER has three checkouts, all under the Apache License 2.0, from which code is imported: ``verl``
(github.com/verl-project/verl), ``openrlhf`` (github.com/OpenRLHF/OpenRLHF) and ``openrlhf_before``,
the same before it dropped KTO and distillation; their commits are below. Packages that the pure
functions do not need are replaced by empty ones. They compute in float64 here, also where they cast
to float32.

Inputs are flat: one number for each trained token, one response after the other. Theirs are padded,
and the padding is 7, so that a mask that is forgotten is seen. Losses have a last row that is all
padding.
"""

import contextlib
import functools
import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch

RECORD = Path(__file__).with_name("verl_and_openrlhf.json")
SOURCES = {
    "verl": "verl-project/verl 1dda039b9c6311889a9c9a26040677e1254814f9, Apache-2.0",
    "openrlhf": "OpenRLHF/OpenRLHF 3c3be6234e0cb353e76bb8019947db9dfe99fca7, Apache-2.0",
    "openrlhf_before": "OpenRLHF/OpenRLHF 04898500df3501c9f3e70cf05afce54b553dc549, Apache-2.0",
}
LENGTHS = (5, 1, 7, 3, 2, 4, 6, 1, 2)
REWARDS = (1.0, 0.0, 0.25, 0.5, 0.5, 0.5, 2.0, -1.0, 0.5)
GROUP = 3
MAX_NEW_TOKENS = 10
COUNT, WIDTH = sum(LENGTHS), max(LENGTHS) + 1
MASK = torch.arange(WIDTH) < torch.tensor([*LENGTHS, 0])[:, None]
PADDING = 7.0
WHOLE = {
    "dp_size": 1,
    "batch_num_tokens": None,
    "global_batch_size": None,
    "loss_scale_factor": MAX_NEW_TOKENS,
}


class Config(SimpleNamespace):
    """Settings of verl, which are read in two ways."""

    def get(self, name, default=None):
        return getattr(self, name, default)


def made_inputs():
    """Numbers of tokens, responses, pairs and distributions."""
    made = torch.Generator().manual_seed(20)
    normal = functools.partial(torch.randn, dtype=torch.float64, generator=made)
    old = -2 * torch.rand(COUNT, dtype=torch.float64, generator=made)
    logps = old + 0.5 * normal(COUNT)
    logps[0] += 1.6  # ratios beyond all bounds, of either sign of the advantage
    logps[8] += 2.0
    found = {
        "old": old,
        "logps": logps,
        "reference": old + 0.4 * normal(COUNT),
        "token_advantages": normal(COUNT),
        "advantages": torch.tensor([0.8, -0.5, -1.3, 0.4, 1.1, -0.2, -0.9, 0.6, -0.7]).double(),
        "old_values": normal(COUNT),
        "values": normal(COUNT),
        "returns": normal(COUNT),
        "chosen": -10 + normal(6),
        "rejected": -10 + 2 * normal(6),
        "reference_chosen": -10 + normal(6),
        "reference_rejected": -10 + normal(6),
        "mismatched": -12 + normal(12),
        "reference_mismatched": -13.5 + normal(12),
        "logits": 2 * normal(5, 7),
        "teacher_logits": 2 * normal(5, 7),
    }
    return {
        "lengths": LENGTHS,
        "rewards": REWARDS,
        "group_size": GROUP,
        "max_new_tokens": MAX_NEW_TOKENS,
        "margins": [0.5, 0.0, 1.25, 2.0, 0.25, 0.75],
        "labels": [3, -100, 0, 6, -100],
        **{name: values.tolist() for name, values in found.items()},
    }


INPUTS = made_inputs()


def tensor(name):
    return torch.tensor(INPUTS[name], dtype=torch.float64)


def padded(values_N):
    """[B, T] of numbers of tokens."""
    found = torch.full(MASK.shape, PADDING, dtype=torch.float64)
    found[MASK] = values_N
    return found


def spread(values_B):
    """[N] of numbers of responses."""
    return values_B.repeat_interleave(torch.tensor(LENGTHS))


def graded(x, loss):
    """A loss and its gradient."""
    x = x.clone().requires_grad_()
    value = loss(x)
    (slopes,) = torch.autograd.grad(value, x)
    return {"value": value.item(), "gradient": slopes.flatten().tolist()}


def of_tokens(name, loss):
    """A loss of padded rows and its gradient at trained tokens; there is none at others."""
    x = padded(tensor(name)).requires_grad_()
    value = loss(x)
    (slopes,) = torch.autograd.grad(value, x)
    assert not slopes[~MASK].any()
    return {"value": value.item(), "gradient": slopes[MASK].tolist()}


def once(values_BT):
    """[B] the number that all tokens of a response have."""
    rows = [row[is_there] for row, is_there in zip(values_BT, MASK[:-1], strict=True)]
    assert all((row == row[0]).all() for row in rows)
    return [row[0].item() for row in rows]


@contextlib.contextmanager
def imported(root, bare, replaced):
    """With the modules of a checkout: packages without what they import, and empty modules."""
    before, path = dict(sys.modules), list(sys.path)
    sys.path.insert(0, str(root))
    for name in bare:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(root.joinpath(*name.split(".")))]
    for name, contents in replaced.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
    try:
        yield importlib.import_module
    finally:
        sys.path[:] = path
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in ("verl", "openrlhf"):
                del sys.modules[name]
        for name in set(sys.modules) & set(replaced):
            del sys.modules[name]


def record_verl(root):
    nothing = mock.MagicMock()
    bare = ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo")
    replaced = {
        "omegaconf": {"DictConfig": type("DictConfig", (), {})},
        "tensordict": {"TensorDict": type("TensorDict", (), {})},
        "verl.utils.device": {"get_device_name": nothing, "get_torch_device": nothing},
        "verl.trainer.config": {"AlgoConfig": type("AlgoConfig", (), {})},
        "verl.workers": {},
        "verl.workers.config": {"ActorConfig": Config},
    }
    with imported(root, bare, replaced) as find:
        groupwise = find("verl.utils.groupwise")
        vars(sys.modules["verl.utils"]).update(
            as_torch_index=groupwise.as_torch_index, group_mean_std=groupwise.group_mean_std
        )
        theirs = find("verl.trainer.ppo.core_algos")
        controller = theirs.AdaptiveKLController(0.2, 6.0, 1000)
        return {
            "policy": verl_policy(theirs),
            "micro_batches": verl_micro_batches(theirs),
            "values": of_tokens(
                "values",
                lambda x: theirs.compute_value_loss(
                    x, padded(tensor("returns")), padded(tensor("old_values")), MASK.double(), 0.2
                )[0],
            ),
            "kl": verl_kl(theirs),
            "gae": [verl_gae(theirs, *pair) for pair in ((1.0, 0.95), (0.9, 0.8))],
            "advantages": verl_advantages(theirs),
            "coefficients": coefficients(controller),
        }


def verl_policy(theirs):
    old, advantages = padded(tensor("old")), padded(spread(tensor("advantages")))

    def of(name, mode, **settings):
        usual = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None}
        unbounded = {"clip_ratio_c": 1e9}  # vanilla is dual_clip
        config = Config(**{**usual, **unbounded, **settings}, global_batch_info=WHOLE)
        function = theirs.get_policy_loss_fn(name)
        return of_tokens(
            "logps", lambda x: function(old, x, advantages, MASK.double(), mode, config)[0]
        )

    modes = {
        "tokens": "token-mean",
        "responses": "seq-mean-token-mean",
        "max_new_tokens": "seq-mean-token-sum-norm",
    }
    found = {}
    for average, mode in modes.items():
        found[f"clip {average}"] = of("vanilla", mode)
        found[f"dual_clip {average}"] = of("vanilla", mode, clip_ratio_c=3.0)
    bounds = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
    found["clip_higher tokens"] = of("vanilla", modes["tokens"], **bounds)
    bounds = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.15}
    found["gspo responses"] = of("gspo", modes["responses"], **bounds)
    for name, low in (("cispo", 1.0), ("cispo_above", 0.2)):
        bounds = {"clip_ratio_low": low, "clip_ratio_high": 1.0}
        found[f"{name} tokens"] = of("cispo", modes["tokens"], **bounds)
    found["sapo responses"] = of("sapo", modes["responses"], tau_pos=1.0, tau_neg=1.05)
    return found


def verl_micro_batches(theirs):
    """The sum of two micro-batches that are divided by the numbers of their global batch."""
    old, advantages = padded(tensor("old")), padded(spread(tensor("advantages")))
    info = {**WHOLE, "batch_num_tokens": COUNT, "global_batch_size": len(LENGTHS)}
    config = Config(
        clip_ratio=0.2,
        clip_ratio_low=None,
        clip_ratio_high=None,
        clip_ratio_c=1e9,
        global_batch_info=info,
    )

    def total(x):
        parts = (slice(0, 4), slice(4, None))
        given = [[each[part] for each in (old, x, advantages, MASK.double())] for part in parts]
        return sum(
            theirs.compute_policy_loss_vanilla(*four, "token-mean", config)[0] for four in given
        )

    return of_tokens("logps", total)


def verl_kl(theirs):
    reference = tensor("reference")
    found = {}
    for kind in ("kl", "low_var_kl", "k1+", "k3+"):
        each = theirs.kl_penalty(tensor("logps"), reference, kind)
        of_sum = graded(tensor("logps"), lambda x: theirs.kl_penalty(x, reference, kind).sum())  # noqa: B023
        found[kind] = {"each": each.tolist(), "gradient": of_sum["gradient"]}
    return found


def verl_gae(theirs, gamma, gae_lambda):
    old, reference, values = (padded(tensor(n))[:-1] for n in ("old", "reference", "old_values"))
    scores = torch.zeros_like(old)
    scores[list(range(len(LENGTHS))), [n - 1 for n in LENGTHS]] = tensor("rewards")
    rewards = theirs.compute_rewards(scores, old, reference, 0.1)
    advantages, returns = theirs.compute_gae_advantage_return(
        rewards, values, MASK[:-1].double(), gamma, gae_lambda
    )
    return {
        "gamma": gamma,
        "gae_lambda": gae_lambda,
        "advantages": advantages[MASK[:-1]].tolist(),
        "returns": returns[MASK[:-1]].tolist(),
    }


def verl_advantages(theirs):
    mask = MASK[:-1].double()
    scores = torch.zeros_like(mask)
    scores[list(range(len(LENGTHS))), [n - 1 for n in LENGTHS]] = tensor("rewards")
    groups = [number // GROUP for number in range(len(LENGTHS))]
    alone = [0, 1, 1]  # a group of one, and one of two

    def of(name, index=groups, **settings):
        function = theirs.get_adv_estimator_fn(name)
        count = len(index)
        more = {} if name == "reinforce_plus_plus" else {"index": index}
        found, _ = function(scores[:count].clone(), mask[:count], **more, **settings)
        return [row[0].item() for row in found] if count < len(LENGTHS) else once(found)

    config = Config(gamma=1.0)
    return {
        "group": of("grpo", epsilon=1e-4),
        "group, their epsilon": of("grpo"),
        "dr_grpo": of("grpo", norm_adv_by_std_in_grpo=False),
        "rloo": of("rloo"),
        "reinforce_plus_plus": of("reinforce_plus_plus", config=config),
        "reinforce_plus_plus_baseline": of("reinforce_plus_plus_baseline", config=config),
        "rloo, alone": of("rloo", alone),
        "rloo_vectorized, alone": of("rloo_vectorized", alone),
    }


def coefficients(controller):
    found = []
    for kl in (3.0, 6.3, 60.0):
        controller.update(kl, 64)
        found.append(float(controller.value))
    return found


def record_openrlhf(root):
    bare = ("openrlhf", "openrlhf.models", "openrlhf.trainer", "openrlhf.trainer.ppo_utils")
    nothing = mock.MagicMock()
    replaced = {
        "deepspeed": {},
        "ray": {},
        "openrlhf.utils": {},
        "openrlhf.utils.utils": {"zero_pad_sequences": nothing},
        "openrlhf.utils.logging_utils": {"init_logger": nothing},
        "openrlhf.utils.seqlen_balancing": {
            "get_minimum_num_micro_batch_size": nothing,
            "get_seqlen_balanced_partitions": nothing,
        },
        "openrlhf.trainer.ray": {},
        "openrlhf.trainer.ray.launcher": {"RayActorGroup": type("RayActorGroup", (), {})},
    }
    with imported(root, bare, replaced) as find:
        losses, utils = find("openrlhf.models.loss"), find("openrlhf.models.utils")
        maker = find("openrlhf.trainer.ppo_utils.experience_maker").RemoteExperienceMaker
        control = find("openrlhf.trainer.ppo_utils.kl_controller")
        controller = control.AdaptiveKLController(0.2, 6.0, 1000)
        return {
            "policy": openrlhf_policy(losses),
            "token_policy": openrlhf_token_policy(losses),
            "values": {str(clip): openrlhf_values(losses, clip) for clip in (None, 0.2)},
            "kl": {
                kind: utils.compute_approx_kl(tensor("logps"), tensor("reference"), kind).tolist()
                for kind in ("k1", "k3")
            },
            "windows": openrlhf_windows(maker, utils),
            "rewards": openrlhf_rewards(losses),
            "pairs": openrlhf_pairs(losses),
            "coefficients": coefficients(controller),
        }


def openrlhf_policy(losses):
    old, advantages = padded(tensor("old")), padded(spread(tensor("advantages")))

    def of(**settings):
        loss = losses.PolicyLoss(**settings)
        return of_tokens("logps", lambda x: loss(x, old, advantages, MASK.double())[0])

    found = {}
    for average, is_by_token in (("tokens", True), ("responses", False)):
        found[f"clip {average}"] = of(token_level_loss=is_by_token)
        found[f"dual_clip {average}"] = of(token_level_loss=is_by_token, dual_clip=3.0)
    found["clip_higher tokens"] = of(clip_eps_low=0.2, clip_eps_high=0.28)
    bounds = {"clip_eps_low": 0.1, "clip_eps_high": 0.15}
    found["gspo responses"] = of(**bounds, policy_loss_type="gspo")
    return found


def openrlhf_token_policy(losses):
    """With an advantage of each token, as in PPO."""
    old, advantages = padded(tensor("old")), padded(tensor("token_advantages"))
    loss = losses.PolicyLoss()
    return of_tokens("logps", lambda x: loss(x, old, advantages, MASK.double())[0])


def openrlhf_values(losses, clip):
    loss = losses.ValueLoss(clip)
    before, wanted = padded(tensor("old_values")), padded(tensor("returns"))
    return of_tokens("values", lambda x: loss(x, before, wanted, MASK.double()))


def openrlhf_windows(maker, utils):
    found = {}
    for name in ("gae", "group_norm", "dr_grpo", "rloo", "reinforce", "reinforce_baseline"):
        coefficient = 0.1 if name == "gae" else 0.0
        advantages, returns = openrlhf_window(maker, utils, name, coefficient)
        is_gae = name == "gae"
        found[name] = {"advantages": advantages[MASK[:-1]].tolist() if is_gae else once(advantages)}
        if is_gae:
            found[name]["returns"] = returns[MASK[:-1]].tolist()
    return found


def openrlhf_window(maker, utils, estimator, coefficient):
    """Of two batches of experience."""
    advantage = SimpleNamespace(estimator=estimator, gamma=1.0, lambd=0.95, no_std_norm=False)
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=GROUP),
        algo=SimpleNamespace(advantage=advantage),
        reward=SimpleNamespace(clip_range=None),
    )
    itself = SimpleNamespace(
        strategy=SimpleNamespace(args=args),
        kl_ctl=SimpleNamespace(value=coefficient),
        advantage_estimator=estimator,
        get_advantages_and_returns=functools.partial(maker.get_advantages_and_returns, None),
        get_cumulative_returns=functools.partial(maker.get_cumulative_returns, None),
    )
    kl = utils.compute_approx_kl(padded(tensor("old")), padded(tensor("reference")), "k1")
    batches = [
        SimpleNamespace(
            index=list(range(*part)),
            rewards=tensor("rewards")[slice(*part)],
            kl=kl[slice(*part)],
            action_mask=MASK[slice(*part)],
            values=padded(tensor("old_values"))[slice(*part)],
            info={},
        )
        for part in ((0, 4), (4, len(LENGTHS)))
    ]
    maker.compute_advantages_and_returns(itself, batches)
    names = ("advantages", "returns")
    return [torch.cat([getattr(batch, name) for batch in batches]) for name in names]


def both(names=("chosen", "rejected")):
    """Numbers of chosen and of rejected responses, one after the other."""
    return torch.cat([tensor(name) for name in names])


def openrlhf_rewards(losses):
    pair, log_exp, margins = losses.PairWiseLoss(), losses.LogExpLoss(), tensor("margins")
    return {
        "plain": graded(both(), lambda x: pair(*x.chunk(2))),
        "margin": graded(both(), lambda x: pair(*x.chunk(2), margins)),
        "log_exp": graded(both(), lambda x: log_exp(*x.chunk(2))),
    }


def openrlhf_pairs(losses):
    reference = both(("reference_chosen", "reference_rejected")).chunk(2)
    kinds = {
        "sigmoid": losses.DPOLoss(0.3),
        "smoothed": losses.DPOLoss(0.3, label_smoothing=0.1),
        "ipo": losses.DPOLoss(0.3, ipo=True),
    }
    return {
        name: graded(both(), lambda x: loss(*x.chunk(2), *reference)[0])  # noqa: B023
        for name, loss in kinds.items()
    }


def record_openrlhf_before(root):
    bare = ("openrlhf", "openrlhf.models")
    with imported(root, bare, {"deepspeed": {}}) as find:
        losses = find("openrlhf.models.loss")
    alone = SimpleNamespace(all_reduce=lambda *_, **__: None, ReduceOp=SimpleNamespace(SUM=None))
    reference = both(("reference_chosen", "reference_rejected")).chunk(2)
    known, expected = tensor("mismatched"), tensor("reference_mismatched")

    def kto(known, expected):
        loss = losses.KTOLoss(0.3, 1.0, 1.5, 1, torch.device("cpu"))
        return graded(both(), lambda x: loss(*x.chunk(2), known, *reference, expected)[0])

    vanilla, kd = losses.VanillaKTOLoss(0.3), losses.KDLoss()
    widened = mock.patch.object(torch, "float32", torch.float64)
    with widened, mock.patch.object(losses, "dist", alone):
        return {
            "kto": kto(known, expected),
            "kto, less likely": kto(expected, known),
            "vanilla_kto": graded(both(), lambda x: vanilla(*x.chunk(2), *reference)[0]),
            "kd": graded(
                tensor("logits"),
                lambda x: kd(x, tensor("teacher_logits"), torch.tensor(INPUTS["labels"])),
            ),
        }


def main():
    torch.set_default_dtype(torch.float64)
    root = Path(sys.argv[1])
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        found = {
            "sources": SOURCES,
            "inputs": INPUTS,
            "verl": record_verl(root / "verl"),
            "openrlhf": record_openrlhf(root / "openrlhf"),
            "openrlhf_before": record_openrlhf_before(root / "openrlhf_before"),
        }
    lines = [f"{json.dumps(name)}: {json.dumps(part)}" for name, part in found.items()]
    RECORD.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
