"""The part of the test hub that takes uploads: contents, commits, new repositories."""

import base64
import hashlib
import json

LARGE = 1000  # bytes; as the downloads of the same server have it


class Uploads:
    """Requests that change a hub, by the protocol of Hugging Face."""

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_POST(self):
        hub, parts = self.server.hub, self.path.partition("?")[0].strip("/").split("/")
        hub.asked.append(f"{self.command} {self.path}")
        said = self.body()
        if hub.needs_token and "secret" not in self.headers.get("Authorization", ""):
            return self.answer_json({"error": "no"}, 401)
        if hub.refuses_uploads and parts[-1] != "create":
            return self.answer_json({"error": hub.refuses_uploads}, 403)
        if parts == ["api", "repos", "create"]:
            wanted = json.loads(said)
            name = f"{wanted['organization']}/{wanted['name']}"
            return self.create(name, wanted.get("visibility") == "private")
        if "validate-yaml" in self.path:
            return self.answer_json({"errors": [], "warnings": []})
        if "preupload" in parts:
            stored = hub.repositories[("models", "/".join(parts[2:4]))]
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "lfs" if f["size"] > LARGE else "regular",
                    "shouldIgnore": False,
                    "oid": content_id(stored[f["path"]]) if f["path"] in stored else None,
                }
                for f in json.loads(said)["files"]
            ]
            return self.answer_json({"files": modes})
        if parts[-1] == "batch":
            return self.batch(json.loads(said)["objects"])
        return self.commit(parts, said)

    def create(self, name, is_private):
        hub = self.server.hub
        if ("models", name) in hub.repositories:
            self.answer_json({"error": "exists"}, 409)
            return
        hub.repositories[("models", name)] = {".gitattributes": b"*.safetensors filter=lfs"}
        hub.private[("models", name)] = is_private
        self.answer_json({"url": f"http://{self.headers['Host']}/{name}"})

    def batch(self, objects):
        host = self.headers["Host"]
        found = [{"oid": o["oid"], "size": o["size"]} for o in objects]
        for each in found:
            if each["oid"] not in self.server.hub.blobs:
                each["actions"] = {"upload": {"href": f"http://{host}/blob/{each['oid']}"}}
        self.answer_json({"objects": found, "transfer": "basic"})

    def do_PUT(self):
        hub, name = self.server.hub, self.path.rpartition("/")[2]
        length = int(self.headers["Content-Length"])
        cut = hub.cuts.pop(0) if hub.cuts else None
        data = self.rfile.read(length if cut is None else min(cut, length))
        hub.received.append((name, len(data)))
        if cut is not None:
            self.close_connection = True
            return self.connection.close()
        assert hashlib.sha256(data).hexdigest() == name
        hub.blobs[name] = data
        return self.answer_json({})

    def commit(self, parts, said):
        hub, at = self.server.hub, parts.index("commit")
        name = "/".join(parts[at - 2 : at])
        repository = hub.repositories[("models", name)]
        changes = _changes(said)
        for path, content, oid in changes:
            if content is None and oid is None:
                del repository[path]
            else:
                repository[path] = content if oid is None else hub.blobs[oid]
        hub.commits.append([path for path, *_ in changes])
        if hub.lost_answers:
            hub.lost_answers -= 1
            self.close_connection = True
            return self.connection.close()
        url = f"http://{self.headers['Host']}/{name}/commit/1"
        return self.answer_json({"commitUrl": url, "commitOid": "a" * 40})


def git_hash(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def content_id(data):
    """What the hub calls a content that it has: its sha256, or its hash in git if it is small."""
    return hashlib.sha256(data).hexdigest() if len(data) > LARGE else git_hash(data)


def _changes(said):
    changes = []
    for line in said.splitlines():
        each = json.loads(line)
        value = each["value"]
        if each["key"] == "file":
            changes.append((value["path"], base64.b64decode(value["content"]), None))
        elif each["key"] == "lfsFile":
            changes.append((value["path"], None, value["oid"]))
        elif each["key"] == "deletedFile":
            changes.append((value["path"], None, None))
    return changes
