"""What is broken on purpose in the checks of settings and files, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

N = "tests/notify"

GIVEN = [
    Bug(
        "a value has the bounds of its type",
        "checks:checked",
        "return msgspec.convert(rule.parse(value), hint)",
        "return rule.parse(value)",
        f"{N}/test_routes.py::test_what_is_wrong_is_said_with_rule_and_remedy_and_no_secret "
        "tests/detect/test_rules.py::test_what_cannot_be_meant_is_refused "
        "tests/collector/test_settings.py::test_what_a_type_does_not_take_is_refused_with_its_rule",
    ),
    Bug(
        "a text that is no UTF-8 is refused by its rule",
        "checks:checked",
        "except (msgspec.ValidationError, UnicodeEncodeError):",
        "except msgspec.ValidationError:",
        "tests/collector/test_settings.py::test_what_a_type_does_not_take_is_refused_with_its_rule",
    ),
    Bug(
        "a channel is not faster than its kind bears",
        "routes_file:_not_of",
        "pace.min_interval_s < kind.pace.min_interval_s",
        "pace.min_interval_s < 0",
        f"{N}/test_routes.py::test_what_is_wrong_is_said_with_rule_and_remedy_and_no_secret",
    ),
    Bug(
        "a receiver that repeats its address does not make it known",
        "safe_http:Target.post",
        'without(text.decode("utf-8", "replace").strip(), self.url)[:_MAX_ERROR_CHARS]',
        'without(text.decode("utf-8", "replace").strip()[:_MAX_ERROR_CHARS], self.url)',
        f"{N}/test_target.py::test_a_receiver_that_repeats_its_address_does_not_make_it_known",
    ),
    Bug(
        "a kind takes the secrets that it names, and no others",
        "routes_file:_not_of",
        "if secret not in kind.secrets and given.pop(secret):",
        "if secret not in kind.secrets and not given.pop(secret):",
        f"{N}/test_routes.py::test_what_is_wrong_is_said_with_rule_and_remedy_and_no_secret",
    ),
]
