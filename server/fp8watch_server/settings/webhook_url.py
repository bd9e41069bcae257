"""What of a webhook's URL can be checked before anything is sent to it."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


class TargetError(ValueError):
    """A URL that must not be used. The text names the rule and the remedy, and never the URL itself."""


def check_url(url: str) -> None:
    """Check what of a URL can be checked without looking its host up.

    Raises:
        TargetError: with the rule and the remedy, never the URL.
    """
    parts = split_url(url)
    if parts.scheme not in ("http", "https"):
        raise TargetError(
            f"webhook URL has scheme {parts.scheme or 'none'!r}; http and https are allowed, so it begins with https://"
        )
    if not parts.hostname:
        raise TargetError("webhook URL has no host; give it whole, like https://hooks.slack.com/services/...")
    if parts.username or parts.password:
        raise TargetError("webhook URL holds a user or password; take them out, use a token in the path")


def split_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url.strip())
        _ = parts.port  # raises where it is no port
    except ValueError:
        raise TargetError("webhook URL cannot be read; give it whole, like https://host/path") from None
    if any(c.isspace() or ord(c) < 32 for c in url.strip()):
        raise TargetError("webhook URL holds a space or a control character; take it out")
    return parts
