"""An empty bucket of Cloud Storage on this machine: the requests that checkpoints make, in memory.

`python tests/fake_bucket.py PORT` serves `gs://bucket`; programs find it through
`STORAGE_EMULATOR_HOST` (gcsfs) and `TENSORSTORE_GCS_HTTP_URL` (TensorStore).
"""

import email
import http.server
import itertools
import json
import re
import sys
import threading
import urllib.parse

lock = threading.Lock()
objects: dict[str, tuple[int, bytes]] = {}  # name -> generation, content
generations = itertools.count(1)


def metadata(name):
    generation, content = objects[name]
    return {
        "kind": "storage#object", "bucket": "bucket", "name": name, "size": str(len(content)),
        "generation": str(generation), "metageneration": "1", "id": f"bucket/{name}/{generation}",
        "timeCreated": "2026-01-01T00:00:00.000Z", "updated": "2026-01-01T00:00:00.000Z",
    }  # fmt: skip


def listing(prefix, delimiter):
    names = sorted(name for name in objects if name.startswith(prefix))
    if not delimiter:
        return {"kind": "storage#objects", "items": [metadata(name) for name in names]}
    rests = {name: name[len(prefix) :].partition(delimiter) for name in names}
    folders = sorted({prefix + first + found for first, found, _ in rests.values() if found})
    files = [metadata(name) for name, (_, found, _) in rests.items() if not found]
    return {"kind": "storage#objects", "items": files, "prefixes": folders}


class Handler(http.server.BaseHTTPRequestHandler):
    """One request after another, on any number of connections."""

    protocol_version = "HTTP/1.1"

    def answer(self, code, content=b"", **headers):
        """Send a reply; what is no bytes, as JSON."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def serve(self):
        """Any method."""
        address = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(address.query))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = re.fullmatch(
            r"(?:/upload|/download)?/storage/v1/b/bucket(/o)?(?:/(.+))?", address.path
        )
        with lock:
            if address.path == "/batch/storage/v1":
                self.delete_many(body)
            elif found is None:
                self.answer(404)
            elif found[1] is None:
                self.answer(200, {"kind": "storage#bucket", "name": "bucket"})
            elif self.command in ("POST", "PUT"):
                self.upload(query, body)
            elif found[2] is None:
                self.answer(200, listing(query.get("prefix", ""), query.get("delimiter")))
            else:
                self.one_object(urllib.parse.unquote(found[2]), query)

    do_GET = do_POST = do_PUT = do_DELETE = serve

    def upload(self, query, body):
        """Whole objects, at once or after a first request that names them."""
        name = query["name"]
        if query["uploadType"] == "resumable" and "upload_id" not in query:
            host = self.headers["Host"]
            self.answer(200, Location=f"http://{host}{self.path}&upload_id=1")
            return
        generation = str(objects.get(name, (0, b""))[0])
        if query.get("ifGenerationMatch", generation) != generation:
            self.answer(412)
            return
        objects[name] = next(generations), body
        self.answer(200, metadata(name))

    def one_object(self, name, query):
        """Read, describe or delete one."""
        if name not in objects:
            self.answer(404)
        elif self.command == "DELETE":
            del objects[name]
            self.answer(204)
        elif query.get("alt") != "media":
            self.answer(200, metadata(name))
        else:
            generation, content = objects[name]
            headers = {"x_goog_generation": generation}
            if query.get("ifGenerationNotMatch") == str(generation):
                self.answer(304, **headers)
            elif span := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(span[1]), int(span[2] or len(content) - 1)
                part = content[first : last + 1]
                headers["Content_Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
                self.answer(206, part, **headers)
            else:
                self.answer(200, content, **headers)

    def delete_many(self, body):
        """Requests within a request, as gcsfs deletes folders."""
        kind = self.headers["Content-Type"]
        parts = email.message_from_bytes(f"Content-Type: {kind}\n\n".encode() + body).get_payload()
        replies = []
        for part in parts:
            name = re.match(r"DELETE \S*/o/(\S+) ", part.get_payload())[1]
            there = objects.pop(urllib.parse.unquote(name), None)
            status = "204 No Content" if there else "404 Not Found"
            replies.append(f"--all\nContent-Type: application/http\n\nHTTP/1.1 {status}\n\n\n")
        reply = "".join(replies) + "--all--"
        self.answer(200, reply.encode(), Content_Type="multipart/mixed; boundary=all")

    def log_message(self, *arguments):
        """Nothing."""


if __name__ == "__main__":
    http.server.ThreadingHTTPServer(("localhost", int(sys.argv[1])), Handler).serve_forever()
