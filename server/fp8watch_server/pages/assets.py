"""Static files and plotly.js, served locally under content-hashed URLs.

Shapes:     file name -> bytes, read once; compressed once
Thread:     any; the caches are filled under a lock
"""

from __future__ import annotations

import gzip
import hashlib
import threading
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib import metadata, resources

from fastapi import APIRouter, Request, Response

MEDIA_TYPES = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
IMMUTABLE = "public, max-age=31536000, immutable"
_compressing = threading.Lock()

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class Asset:
    """One file as it is sent."""

    body: bytes
    media_type: str

    @cached_property
    def compressed(self) -> bytes:
        with _compressing:  # 4.8 MB of plotly.js: 0.2 s, once, on the first request
            return self.__dict__.get("compressed") or gzip.compress(self.body, 6, mtime=0)

    def response(self, request: Request, cache_control: str) -> Response:
        headers = {"cache-control": cache_control, "vary": "accept-encoding"}
        if len(self.body) > 1024 and "gzip" in request.headers.get("accept-encoding", ""):
            headers["content-encoding"] = "gzip"
            return Response(self.compressed, media_type=self.media_type, headers=headers)
        return Response(self.body, media_type=self.media_type, headers=headers)


@lru_cache(maxsize=1)
def static_files() -> dict[str, Asset]:
    """Everything in static/, by name. Other names cannot be requested, so there is no path traversal."""
    found = {}
    for entry in resources.files(__package__).joinpath("static").iterdir():
        media_type = MEDIA_TYPES.get(entry.name.rpartition(".")[2])
        if media_type is not None and entry.is_file():
            found[entry.name] = Asset(entry.read_bytes(), media_type)
    return found


@lru_cache(maxsize=1)
def digest() -> str:
    """One digest of all files: modules import each other by relative URL, so they change URL together."""
    h = hashlib.blake2b(digest_size=8)
    for name, asset in sorted(static_files().items()):
        h.update(name.encode() + b"\0" + asset.body)
    return h.hexdigest()


@lru_cache(maxsize=1)
def plotly() -> Asset:
    """plotly.js from the plotly wheel."""
    body = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    return Asset(body, MEDIA_TYPES["js"])


def static_url(name: str) -> str:
    """URL of a file in static/. An unknown name is a template bug, and raises."""
    if name not in static_files():
        raise KeyError(f"{name}: no such file in static/; there are {', '.join(sorted(static_files()))}")
    return f"/static/{digest()}/{name}"


def static_text(name: str) -> str:
    """A file of static/ as text, for a page that loads nothing."""
    return static_files()[name].body.decode()


def plotly_url() -> str:
    """URL of plotly.js, with the version of the wheel in it."""
    return f"/assets/plotly-{metadata.version('plotly')}.min.js"


@router.get("/static/{of}/{name}")
def static(request: Request, of: str, name: str) -> Response:
    """A file of static/. Under an older digest it is served too, for pages that were open during an upgrade."""
    asset = static_files().get(name)
    if asset is None:
        return Response("no such file\n", status_code=404, media_type="text/plain")
    return asset.response(request, IMMUTABLE if of == digest() else "no-cache")


@router.get("/assets/{name}")
def plotly_script(request: Request, name: str) -> Response:
    """plotly.js of this installation's version."""
    if f"/assets/{name}" != plotly_url():
        return Response("no such file\n", status_code=404, media_type="text/plain")
    return plotly().response(request, IMMUTABLE)


@router.get("/favicon.ico")
def favicon(request: Request) -> Response:
    """For pages that name no icon (JSON opened in a tab)."""
    return static_files()["favicon.svg"].response(request, "public, max-age=86400")
