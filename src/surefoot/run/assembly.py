"""The parts of a run, put together in reading order. The only place where they meet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import interchange
from ..batch import Batch, Outputs, StepRunner
from ..checkpoint.background.saver import SaveListener
from ..checkpoint.layouts import scattered
from ..checkpoint.reading.loading import load as load_checkpoint
from ..data.store.run_data import TrainingData
from ..data.text.codec import Codec
from ..data.text.templates import template_mismatch
from ..errors import RecipeError
from ..geometry.sharding import Cuts
from ..methods.full import Full
from ..model.attention import packed, selection
from ..model.fused_lora import enable_fused_lora
from ..model.head import outputs
from ..model.head.logprob_head import LogprobHead, asked_head
from ..model.malloc import keep_freed_memory
from ..model.precision import LossScaler, PrecisionName, autocast, choose
from ..model.pretrained import companions
from ..model.pretrained.adapter import continue_adapter
from ..model.pretrained.compiled import compile_layers
from ..model.pretrained.loading import (
    device,
    grow_embeddings,
    load_model,
    recompute_activations,
    resolve,
    training_dtype,
    upcast_trained,
)
from ..model.pretrained.quantized import check_alone, num_elements
from ..model.pretrained.weights import AdapterWeights, FullWeights, names_in_files
from ..model.seeding import seed_everything, use_deterministic_kernels
from ..optim.state import NamedState
from ..parallel.model_runner import Forward, plain
from ..parallel.pipeline.pipeline import run_forward, run_windows
from ..parallel.sharded_model import gather_nothing, layers, shard
from ..parallel.tensor.sequence_parallel import widened
from ..parallel.tensor.vocab_parallel import cut_vocabulary
from ..parallel.world import ALONE, World
from ..recipe.recipe import Recipe, dump
from ..recipe.recipe_data import open_codec
from ..references import ReferenceLogps, reference_model, references
from ..staging import PipelinedModel, to_pipeline
from ..startup import (
    ShardLoader,
    init_on_meta,
    select_packed_attention,
    select_prompt_sharing,
    verify_packing_isolation,
)
from ..training.callback import Callbacks, Context, TrainerCallback
from ..training.log_accumulator import LogAccumulator
from ..training.saver import Saver
from ..training.stage import Models, measured, smoothing
from ..training.state import TrainerControl, TrainerState
from ..training.step import Step
from ..training.trainer import Trainer
from . import data_loading
from .recipe_callbacks import standard_callbacks

logger = logging.getLogger(__name__)


def build(
    recipe: Recipe,
    *,
    callbacks: Sequence[TrainerCallback] = (),
    resume: Path | None = None,
    trust_pickle: bool = False,
    world: World = ALONE,
    is_trial: bool = False,
    listeners: Sequence[SaveListener] = (),
) -> Trainer:
    """The trainer of a recipe, its states those of the checkpoint ``resume`` if one is given. Of a
    trial only the speed matters: no reference is asked about its examples."""
    writer: interchange.Writer | None = None
    if resume is not None:
        writer = interchange.detect_trainer(resume, trust_pickle=trust_pickle, pp=world.pp)
    seed_everything(recipe.train.seed)
    use_deterministic_kernels(recipe.train.deterministic)
    keep_freed_memory()
    base = resolve(recipe.model)
    codec = build_codec(recipe, base)
    data, feeder = data_loading.open_data(recipe, codec, base, world)
    asked = references(recipe, base, data, world)
    if asked is not None and not is_trial:
        precompute_with_other_model(recipe, codec, data, asked, world)
    is_asked = asked is None or asked.is_complete or is_trial
    is_kept = resume is not None and writer != "trainer" and recipe.method.kind == "full"
    is_kept = is_kept and is_asked  # what is not to be asked anything need not have values
    policy = build_policy(recipe, base, codec.tokenizer, world, is_read=not is_kept)
    saver = build_saver(recipe, policy, codec, base, world)
    is_foreign = writer is not None
    saver = replace(saver, resumed_from=resume, is_foreign=is_foreign, listeners=listeners)
    trainer = assemble(recipe, policy, data, saver, world)
    if asked is not None:
        attach_reference_logps(trainer, recipe, policy, data, asked.blank() if is_trial else asked)
    trainer.feeder = feeder
    trainer.callbacks.members = [*standard_callbacks(recipe, world), *callbacks]
    if resume is not None:
        if writer is not None:
            interchange.resume_from(resume, writer, trainer, base=base, trust_pickle=trust_pickle)
        else:
            load_checkpoint(resume, trainer.states)
        logger.info("resuming from %s at step %d", resume.name, trainer.state.global_step)
    kernels = trainer.state.kernels
    if can_select_attention(recipe, policy, world):
        known = kernels.packed_attention or (selection.BY_DOCUMENT if resume else None)
        dtype = policy_dtype(recipe, policy)
        bounds = data_loading.packed_bounds(recipe, trainer.loader)
        kernels.packed_attention = select_packed_attention(
            policy.inner, bounds, dtype, known, world
        )
    if recipe.data.packing and policy.values is not None:
        policy.model.eval()
        is_proven = verify_packing_isolation(
            trainer.forward, policy.inner
        )  # it has values only now
        policy.sharing.is_proven = world.from_main(is_proven)
        gather_nothing(policy.model)
    if recipe.data.packing:
        known_sharing = kernels.shared_prompts
        kernels.shared_prompts = select_prompt_sharing(policy.sharing, policy.inner, known_sharing)
    trainer.callbacks.emit("on_init_end")
    return trainer


def precompute_with_other_model(
    recipe: Recipe, codec: Codec, data: TrainingData, asked: ReferenceLogps, world: World
) -> None:
    """Ask the model that the recipe compares with, if it is another one than that which will learn;
    it is loaded for that, and let go. Raises ``RecipeError`` if it has other tokens."""
    model = reference_model(recipe)
    if model is recipe.model or asked.is_complete:
        return
    other, base = replace(recipe, model=model, method=Full()), resolve(model)
    tokenizer = open_codec(other, base).tokenizer
    if tokenizer.get_vocab() != codec.tokenizer.get_vocab():
        raise RecipeError(
            f"stage.dpo.reference: {model.path} has other tokens than {recipe.model.path}, so what "
            "it says of an answer is not to be compared; name a model with the same tokenizer"
        )
    policy = build_policy(other, base, tokenizer, world)
    saver = build_saver(other, policy, codec, base, world)
    made = assemble(other, policy, data, saver, world)
    asked.ask(made.forward, policy.model, data_loading.build_collate(other, policy.sharing))


def attach_reference_logps(
    trainer: Trainer, recipe: Recipe, policy: Policy, data: TrainingData, asked: ReferenceLogps
) -> None:
    """Let the examples of ``trainer``, which has not begun, have what the reference says of them,
    that is, its own policy now."""
    collate, world = data_loading.build_collate(recipe, policy.sharing), trainer.world
    asked.ask(trainer.forward, policy.model, collate)
    data = asked.added(data)
    trainer.loader = data_loading.build_loader(recipe, data, collate, world)
    trainer.evals = data_loading.build_evals(recipe, data, collate, world)


def build_codec(recipe: Recipe, base: Path) -> Codec:
    """Tokenizer and chat template; from here on the tokenizer carries the template that is used."""
    codec = open_codec(recipe, base)
    if recipe.stage.uses_template:
        if difference := template_mismatch(codec.template, codec.tokenizer):
            logger.warning("%s", difference)
        codec.tokenizer.chat_template = codec.template.source
    return codec


@dataclass(frozen=True)
class Policy:
    """The model that learns."""

    model: nn.Module
    inner: PreTrainedModel  # the same without its adapter
    weights: FullWeights | AdapterWeights  # what its checkpoints hold
    values: ShardLoader | None = None  # of a model that has none yet
    head: LogprobHead | None = None  # of ``inner``, if it can be asked for more than logits
    sharing: packed.PromptSharing = field(default_factory=packed.PromptSharing)


def build_policy(
    recipe: Recipe,
    base: Path,
    tokenizer: PreTrainedTokenizerBase,
    world: World = ALONE,
    *,
    is_read: bool = True,
) -> Policy:
    """The pretrained model, made ready to learn by the recipe's method.

    If several processes will share it, or if it is not to be read, because a checkpoint has all of
    it, it has no values yet.
    """
    dtype = training_dtype(recipe.model)
    check_alone(recipe.model, world.size)
    start = None
    if world.mesh is not None or not is_read:
        start = init_on_meta(base, recipe.model, dtype=dtype)
    model = (
        load_model(base, recipe.model, dtype=dtype, weights=scattered(base))
        if start is None
        else start.model
    )
    grew = grow_embeddings(model, tokenizer)
    sharing = packed.PromptSharing()
    if recipe.data.packing and start is None:
        sharing.is_proven = packed.use_packed(model)
    elif recipe.data.packing:
        packed.switch_to_packed(model)
    seed_everything(recipe.train.seed, 1)
    method: Callable[[PreTrainedModel], nn.Module] = recipe.method.apply
    if recipe.model.adapter is not None:
        method = partial(continue_adapter, folder=recipe.model.adapter)
    policy, values = (method(model), None) if start is None else start.apply(method)
    is_adapter = recipe.method.kind == "adapter"
    if is_adapter:
        enable_fused_lora(policy)
    if values is not None and not is_read:
        values = ShardLoader({}, {})
    if recipe.model.gradient_checkpointing:
        recompute_activations(model)
    if grew:
        _refuse_frozen_new_tokens(policy)
    upcast_trained(policy, recipe.model)
    learning = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    share = learning / sum(num_elements(p) for p in policy.parameters())
    logger.info("trainable parameters: %s (%.3g %% of all)", f"{learning:,}", 100 * share)
    weights = AdapterWeights(policy) if is_adapter else FullWeights(model)
    return Policy(policy, model, weights, values, asked_head(model), sharing)


def _refuse_frozen_new_tokens(policy: nn.Module) -> None:
    embeddings: nn.Module = policy.get_input_embeddings()  # type: ignore[operator]
    if not any(p.requires_grad for p in embeddings.parameters()):
        raise RecipeError(
            "model.new_special_tokens: the embeddings of the new tokens would never learn; "
            "name them in method.lora.modules_to_save (embed_tokens, lm_head) or in "
            "method.freeze.extra_modules, or use method: full"
        )


def can_select_attention(recipe: Recipe, policy: Policy, world: World) -> bool:
    """Whether the run selects the kernel of its packed rows."""
    kernel, is_free = policy.inner.config._attn_implementation, recipe.model.attention == "auto"
    return recipe.data.packing and is_free and world.pp == 1 and kernel == f"{packed.PREFIX}sdpa"


def policy_dtype(recipe: Recipe, policy: Policy) -> torch.dtype:
    """The type that most of the arithmetic is done in."""
    held: torch.dtype = policy.inner.dtype
    types = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": held}
    return types[choose(recipe.train.precision)]


def assemble(
    recipe: Recipe, policy: Policy, data: TrainingData, saver: Saver, world: World
) -> Trainer:
    """Put the parts together."""
    collate = data_loading.build_collate(recipe, policy.sharing)
    loader = data_loading.build_loader(recipe, data, collate, world)
    section, precision = recipe.train, choose(recipe.train.precision)
    names = names_in_files(policy.model, policy.weights)  # before they are cut
    size = sum(num_elements(p) for p in policy.model.parameters())
    staging = to_pipeline(policy.model, policy.inner, policy.weights, names, world, recipe.parallel)
    names = names if staging is None else dict(staging.names)
    values = None if policy.values is None else policy.values.of(policy.model)
    dtype = torch.bfloat16 if precision == "bf16" else None
    stages = None if staging is None else staging.stretches()
    found = shard(policy.model, policy.inner, world, recipe.parallel, dtype=dtype, stages=stages)
    if values is not None:
        values.fill(policy.model, found, world)
    if recipe.model.compile:
        compile_layers(layers(policy.model))
    cuts = {names[name]: cut for name, cut in found.items()}
    learning = [(names[n], p) for n, p in policy.model.named_parameters() if p.requires_grad]
    max_steps = data_loading.num_steps(section, loader.steps_per_epoch)
    state = TrainerState(
        max_steps=max_steps,
        num_train_epochs=section.num_epochs,
        train_batch_size=section.micro_batch_size,
    )
    optimizer = recipe.optim.build(learning)
    engine = build_engine(policy, staging, recipe, world, precision, cuts)
    weights, moments = replace(policy.weights, cuts=cuts), NamedState(optimizer, cuts)
    control = TrainerControl()
    counts = loader.num_examples, loader.steps_per_epoch
    context = Context(section, policy.model, optimizer, section.folder, *counts)
    return Trainer(
        section=section,
        stage=recipe.stage,
        models=Models(policy.model),
        weights=weights if staging is None else staging.weights(weights),
        optimizer_state=moments if staging is None else staging.optimizer(moments),
        step=Step(
            optimizer,
            recipe.optim.schedule_over(max_steps),
            engine.run_window,
            section.max_grad_norm,
            LossScaler(enabled=precision == "fp16"),
            world.summed,
            world.totals,
            copies=frozenset() if staging is None else staging.copies(),
        ),
        forward=engine.forward,
        loader=loader,
        evals=data_loading.build_evals(recipe, data, collate, world),
        saver=saver,
        callbacks=Callbacks(context, state, control),
        state=state,
        control=control,
        interval=LogAccumulator(state, size),
        world=world,
    )


@dataclass(frozen=True)
class ModelRunner:
    """How the model is run: a window to learn from, a batch to measure."""

    run_window: StepRunner
    forward: Forward


def build_engine(
    policy: Policy,
    staging: PipelinedModel | None,
    recipe: Recipe,
    world: World,
    precision: PrecisionName,
    cuts: Mapping[str, Cuts],
) -> ModelRunner:
    """A pipeline, if the model is shared out over one; otherwise one micro-batch after another."""
    learning, measuring = recipe.stage.needs, measured(recipe.stage)
    if staging is None:
        forward = partial(build_forward, policy, recipe, world, precision)
        return ModelRunner(plain(forward(learning), device()), forward(measuring))
    head = None if world.tp > 1 else policy.head
    pipeline = staging.pipeline(recipe.parallel, precision, cuts)
    finish = partial(staging.finish, precision, smoothing(recipe.stage), head)
    return ModelRunner(
        run_windows(pipeline, finish(learning)), run_forward(pipeline, finish(measuring))
    )


def build_forward(
    policy: Policy, recipe: Recipe, world: World, precision: PrecisionName, needs: Sequence[str]
) -> Forward:
    """A batch through the model to what a stage needs of it."""
    vocabulary = cut_vocabulary(policy.inner, world)
    head = None if world.tp > 1 else policy.head
    multiple = world.tp if recipe.parallel.sequence_parallel else 1
    compute = partial(
        outputs.compute,
        policy.model,
        needs=needs,
        vocabulary=vocabulary,
        head=head,
        smoothing=smoothing(recipe.stage),
    )

    def forward(batch: Batch) -> Outputs:
        with autocast(precision, batch.input_ids.device):
            return compute(widened(batch, multiple))

    return forward


def build_saver(recipe: Recipe, policy: Policy, codec: Codec, base: Path, world: World) -> Saver:
    """Where checkpoints go and what lies beside the weights in each of them."""
    files = {
        "recipe.yaml": dump(recipe).encode(),
        **companions.tokenizer_files(codec.tokenizer),
    }
    if recipe.method.kind == "adapter":
        files |= companions.adapter_files(policy.model, recipe.model)
    else:
        files |= companions.model_files(policy.inner, base, codec.stop_token_ids)
    layout = recipe.checkpoint.layout_in(recipe.train.output_dir)
    return Saver(
        output_dir=recipe.train.folder,
        section=replace(recipe.checkpoint, layout=layout),
        kind=recipe.method.kind,
        companions=files,
        steps={
            "log_steps": recipe.train.log_steps,
            "eval_steps": recipe.train.eval_steps,
            "save_steps": recipe.checkpoint.save_steps,
        },
        metric=recipe.train.metric_for_best_model,
        greater=recipe.train.is_greater_better,
        world=world,
    )
