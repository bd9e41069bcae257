"""What tests/notify/test_outbox.py and others share."""

from __future__ import annotations

from notify.receiver import Receiver

from fp8watch_server.notify.channels.base import Pace
from fp8watch_server.notify.channels.webhook import WebhookChannel
from fp8watch_server.notify.safe_http import Target

AT_ONCE = Pace(group_wait_s=0.0, group_interval_s=0.0)


def webhook(receiver: Receiver, name: str = "webhook", pace: Pace = AT_ONCE) -> WebhookChannel:
    return WebhookChannel(Target(receiver.url, from_operator=True), name=name, pace=pace)


SENDER = """
import sys
from fp8watch_server.notify.channels.webhook import WebhookChannel
from fp8watch_server.notify.outbox import Dispatcher
from fp8watch_server.notify.safe_http import Target
from fp8watch_server.db.dialect import make_engine
d = Dispatcher(make_engine(sys.argv[1]), [WebhookChannel(Target(sys.argv[2], from_operator=True))], poll_s=0.02, lease_s=600)
d.start()
sys.stdin.read()
"""
