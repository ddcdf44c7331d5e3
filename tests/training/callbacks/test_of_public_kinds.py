"""Callbacks of the kinds that projects publish for transformers' Trainer, written anew: what they
may do here does what it does there, and the rest is an error of one sentence."""

import csv
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.request import Request, urlopen

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerCallback

import surefoot
from folders import save_recipe
from surefoot.errors import RunError

SETTINGS = {"log_steps": 1, "eval_steps": 1, "max_steps": 6}


def trained(folder, *callbacks, **settings):
    recipe = save_recipe(folder, train=SETTINGS, checkpoint={"save_steps": 2})
    return surefoot.train(recipe, callbacks=callbacks, train=settings)


def logged(run, name):
    return [record[name] for record in run.log_history if name in record]


class StopAtTime(TrainerCallback):
    """Ends a job before its time is over, with a save."""

    def __init__(self, seconds, clock):
        self.seconds, self.clock = seconds, clock

    def on_train_begin(self, args, state, control, **kwargs):
        self.end = self.clock() + self.seconds

    def on_step_end(self, args, state, control, **kwargs):
        if self.clock() >= self.end:
            control.should_save = control.should_training_stop = True
        return control


def test_a_run_ends_when_its_time_is_over(tmp_path):
    ticks = iter(range(100))
    run = trained(tmp_path, StopAtTime(3, lambda: next(ticks)))
    assert run.global_step == 3
    assert (tmp_path / "run/checkpoint-3").is_dir()


class SampleResponses(TrainerCallback):
    """Generates at every evaluation."""

    def __init__(self, prompt):
        self.prompt, self.texts = prompt, []

    def on_evaluate(self, args, state, control, model, processing_class, **kwargs):
        chat = [{"role": "user", "content": self.prompt}]
        options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
        ids = processing_class.apply_chat_template(chat, **options).to(args.device)
        made = model.generate(**ids, max_new_tokens=4, do_sample=False)
        self.texts.append(processing_class.decode(made[0, ids["input_ids"].shape[1] :]))


def test_responses_are_sampled_at_evaluations_and_change_no_weight(tmp_path):
    samples = SampleResponses("1+1?")
    run = trained(tmp_path, samples)
    plain = trained(tmp_path, output_dir=str(tmp_path / "plain")).model.state_dict()
    assert len(samples.texts) == 6
    assert all(torch.equal(x, plain[name]) for name, x in run.model.state_dict().items())


class GradientNorms(TrainerCallback):
    """Notes the norm of the gradients before each update."""

    def __init__(self):
        self.norms = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        norms = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
        self.norms.append(float(norms.norm()))


def test_norms_of_gradients_are_those_of_the_log(tmp_path):
    norms = GradientNorms()
    run = trained(tmp_path, norms, max_grad_norm=0.0)
    assert norms.norms == pytest.approx(logged(run, "grad_norm"), rel=1e-4)


class FreezeUntil(TrainerCallback):
    """Leaves a layer as it is until a step."""

    def __init__(self, step, part):
        self.step, self.part, self.values = step, part, []

    def on_step_begin(self, args, state, control, model, **kwargs):
        weights = [p for name, p in model.named_parameters() if self.part in name]
        self.values.append(weights[0].detach().clone())
        for weight in weights:
            weight.requires_grad_(state.global_step >= self.step)


def test_a_layer_stays_as_it_is_until_a_step(tmp_path):
    frozen = FreezeUntil(3, "layers.0")
    trained(tmp_path, frozen)
    is_moved = [not torch.equal(value, frozen.values[0]) for value in frozen.values]
    assert is_moved == [False, False, False, False, True, True]


class Dashboard(TrainerCallback):
    """Sends each log to a server, from the main process."""

    def __init__(self, url):
        self.url = url

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero:
            row = {"run": args.run_name, "step": state.global_step, **logs}
            urlopen(Request(self.url, json.dumps(row).encode(), method="POST")).close()


def test_logs_are_pushed_to_a_dashboard(tmp_path):
    rows = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            rows.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        run = trained(tmp_path, Dashboard(f"http://127.0.0.1:{server.server_port}/"))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [row["loss"] for row in rows if "loss" in row] == logged(run, "loss")
    assert {row["run"] for row in rows} == {"run"}


class MeanOfWeights(TrainerCallback):
    """An exponential mean of the weights, kept in checkpoints and written beside the last one."""

    def __init__(self, decay=0.5):
        self.decay, self.means = decay, {}

    def on_step_end(self, args, state, control, model=None, **kwargs):
        for name, value in model.state_dict().items():
            mean = self.means.setdefault(name, value.detach().clone())
            mean.lerp_(value, 1 - self.decay)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        model.save_pretrained(args.output_dir / "mean", state_dict=self.means)

    def state_dict(self):
        return dict(self.means)

    def load_state_dict(self, state):
        self.means = dict(state)


def test_a_mean_of_weights_is_resumed_and_opens_as_a_model(tmp_path):
    trained(tmp_path, whole := MeanOfWeights())
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "run/mean").state_dict()
    assert all(torch.equal(opened[name], mean) for name, mean in whole.means.items())
    stopped = {"output_dir": str(tmp_path / "other")}
    trained(tmp_path, MeanOfWeights(), StopAtTime(3, iter(range(99)).__next__), **stopped)
    trained(tmp_path, resumed := MeanOfWeights(), **stopped)
    assert all(torch.equal(resumed.means[name], mean) for name, mean in whole.means.items())


class SaveOnMetric(TrainerCallback):
    """Saves where a metric is good enough, and notes which checkpoints came of it."""

    def __init__(self, metric, limit):
        self.metric, self.limit, self.steps, self.saved = metric, limit, [], []

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        if metrics[self.metric] < self.limit:
            control.should_save = True
            self.steps.append(state.global_step)
        return control

    def on_save(self, args, state, control, **kwargs):
        self.saved.append(state.global_step)
        note = args.output_dir / f"checkpoint-{state.global_step}" / "note.txt"
        note.write_text("saved")


def test_a_good_metric_is_saved(tmp_path):
    saves = SaveOnMetric("eval_loss", float("inf"))
    trained(tmp_path, saves)
    assert saves.steps == [1, 2, 3, 4, 5, 6] == saves.saved
    assert (tmp_path / "run/checkpoint-6/note.txt").exists()


class LearningRates(TrainerCallback):
    """The rates by group of the optimizer and by the schedule."""

    def __init__(self):
        self.rates = []

    def on_step_end(self, args, state, control, optimizer=None, lr_scheduler=None, **kwargs):
        assert lr_scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]
        self.rates.append(lr_scheduler.get_last_lr()[0])


def test_learning_rates_are_those_of_the_log(tmp_path):
    rates = LearningRates()
    run = trained(tmp_path, rates)
    assert rates.rates == logged(run, "learning_rate")
    assert len(set(rates.rates)) == 6


class CsvWriter(TrainerCallback):
    """One row of a table for each log of a loss."""

    columns = ("step", "loss", "learning_rate")

    def on_log(self, args, state, control, logs=None, **kwargs):
        if args.should_save and "loss" in logs:
            with (args.output_dir / "log.csv").open("a", newline="") as file:
                csv.writer(file).writerow([logs[name] for name in self.columns])


def test_a_table_has_the_logs(tmp_path):
    run = trained(tmp_path, CsvWriter)
    rows = [*csv.reader((tmp_path / "run/log.csv").read_text().splitlines())]
    assert [float(row[1]) for row in rows] == logged(run, "loss")


class OwnPatience(TrainerCallback):
    """Stops when the loss of training has not fallen by a share for some logs."""

    def __init__(self, patience, share):
        self.patience, self.share, self.best, self.waited = patience, share, float("inf"), 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" not in logs:
            return
        is_better = logs["loss"] < self.best * (1 - self.share)
        self.best, self.waited = min(self.best, logs["loss"]), 0 if is_better else self.waited + 1
        control.should_training_stop |= self.waited >= self.patience


def test_a_patience_of_ones_own_stops_the_run(tmp_path):
    assert trained(tmp_path, OwnPatience(2, share=0.9)).global_step == 3


class SetsTheRate(TrainerCallback):
    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        for group in optimizer.param_groups:
            group["lr"] = 1.0


class StepsTheSchedule(TrainerCallback):
    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        lr_scheduler.step()


class SetsTheEpoch(TrainerCallback):
    def on_epoch_begin(self, args, state, control, train_dataloader=None, **kwargs):
        train_dataloader.sampler.set_epoch(int(state.epoch))


@pytest.mark.parametrize(
    ("callback", "says"),
    [
        (SetsTheRate, r"SetsTheRate\.on_step_begin sets a learning rate.*: set optim\.NAME\.sched"),
        (StepsTheSchedule, r"lr_scheduler has no step here.*optim\.NAME\.schedule"),
        (SetsTheEpoch, r"a dataloader has no sampler here.*the order and the batches"),
    ],
)
def test_what_would_train_behind_the_recipe_is_an_error_with_the_cure(callback, says, tmp_path):
    with pytest.raises((RunError, AttributeError), match=says):
        trained(tmp_path, callback)
