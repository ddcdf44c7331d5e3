"""A server that samples with Surefoot's engine, and speaks as vLLM, SGLang or OpenAI do."""

import contextlib
import json
import threading
import zlib
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from peft import PeftModel
from transformers import AutoModelForCausalLM

from answering import sample
from surefoot.generate.section import sampling


class SamplingServer:
    """Its answers are other ones at each request. ``seen`` has the requests; ``change`` alters the
    answers of ``/v1/completions`` and ``/generate``; ``last`` is the last such request that it
    answers before it dies."""

    def __init__(self, base, *, port=0, change=lambda body, found: found, last=None, scale=1.0):
        self.base, self.change, self.last, self.scale = base, change, last, scale
        self.seen, self.models, self.version = [], {}, "default"
        self.counts = Counter[str]()
        self.num_sampled, self.is_deaf, self._lock = 0, False, threading.Lock()
        self.model = self._plain(base)
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner._lock:
                    owner.seen.append((self.path, body))
                    found = owner.answer(self.path, body)
                if found is None:
                    self.close_connection = True
                    return
                self.reply(*found)

            def do_GET(self):
                self.reply(200, {"data": [{"id": "served"}]})

            def reply(self, code, found):
                data = found.encode() if isinstance(found, str) else json.dumps(found).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def _plain(self, folder):
        return AutoModelForCausalLM.from_pretrained(folder).eval()

    def _adapted(self, folder):
        return PeftModel.from_pretrained(self._plain(self.base), folder).eval()

    def answer(self, path, body):
        """The status and body of an answer; None: the connection is cut."""
        if path in ("/v1/completions", "/generate"):
            return self._sampled(path, body)
        if self.is_deaf:
            return 200, {"success": True}
        if path == "/v1/load_lora_adapter":
            if body["lora_name"] in self.models:
                return 400, "already loaded"
            self.models[body["lora_name"]] = self._adapted(body["lora_path"])
            return 200, "Success: LoRA adapter added"
        if path == "/load_lora_adapter":
            self.models[body["lora_name"]] = self._adapted(body["lora_path"])
            return 200, {"success": True}
        if path in ("/v1/unload_lora_adapter", "/unload_lora_adapter"):
            del self.models[body["lora_name"]]
            return 200, {"success": True}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            self.model = self._plain(body["kwargs"]["weights_path"])
            return 200, {"results": [None]}
        if path == "/update_weights_from_disk":
            self.model, self.version = self._plain(body["model_path"]), body["weight_version"]
            return 200, {"success": True, "message": "Succeeded", "num_paused_requests": 0}
        if path == "/update":
            read = self._adapted if body["kind"] == "adapter" else self._plain
            self.models = {body["name"]: read(Path(body["path"]))}
            return 200, {"model": body["name"]}
        return (200, "") if path == "/reset_prefix_cache" else (404, "no such endpoint")

    def _sampled(self, path, body):
        if self.last is not None and self.num_sampled >= self.last:
            return None
        self.num_sampled += 1
        is_sglang = path == "/generate"
        name = body.get("lora_path") if is_sglang else body["model"]
        if not is_sglang and name != "served" and name not in self.models and not self.is_deaf:
            return 404, {"message": f"The model {name} does not exist."}
        found = self._samples(self.models.get(name, self.model), body, is_sglang=is_sglang)
        made = self._as_sglang(found) if is_sglang else self._as_openai(found, name)
        return 200, self.change(body, made)

    def _samples(self, model, body, *, is_sglang):
        settings = body["sampling_params"] if is_sglang else body
        prompts = body["input_ids"] if is_sglang else [body["prompt"]] * body["n"]
        most = settings["max_new_tokens" if is_sglang else "max_tokens"]
        section = sampling(most, settings["temperature"] * self.scale, 8)
        stops = settings["stop_token_ids"]
        # Of the prompt, and not of the order in which requests that run side by side arrive.
        key = repr(prompts[0])
        self.counts[key] += 1
        seed = zlib.crc32(key.encode()) + self.counts[key]
        found = sample(model, prompts, section, stop_token_ids=stops, seed=seed)
        return [found[index] for index in range(len(prompts))]

    def _as_openai(self, found, name):
        choices = [
            {
                "index": i,
                "token_ids": [*one.ids],
                "logprobs": {"token_logprobs": [*one.logps], "tokens": []},
                "finish_reason": "stop" if one.finish_reason == "stop" else "length",
            }
            for i, one in enumerate(found)
        ]
        return {"model": name, "choices": choices}

    def _as_sglang(self, found):
        return [
            {
                "output_ids": [*one.ids],
                "meta_info": {
                    "output_token_logprobs": [
                        [logp, token, None] for token, logp in zip(one.ids, one.logps, strict=True)
                    ],
                    "finish_reason": {"type": "stop" if one.finish_reason == "stop" else "length"},
                    "weight_version": self.version,
                },
            }
            for one in found
        ]

    @property
    def asked(self):
        """The paths of the requests, without those that sample."""
        paths = [path for path, _ in self.seen]
        return [path for path in paths if path not in ("/v1/completions", "/generate")]


@contextlib.contextmanager
def serving(base, **settings):
    with SamplingServer(base, **settings) as server:
        yield server
