"""A web server that keeps what it is sent, and answers as it is told."""

import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append((self.path, json.loads(data)))
        answers = self.server.answers
        answer = answers.pop(0) if answers else 200
        if answer == "hang":
            self.server.over.wait(60)
            return
        status, body = answer if isinstance(answer, tuple) else (answer, {})
        body = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@contextmanager
def listening(*answers):
    """The server: ``url``, ``received``; the first requests get ``answers``, later ones 200."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.answers, server.received, server.over = list(answers), [], threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}/hooks/T0P-s3cret"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()
