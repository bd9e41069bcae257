"""What is broken on purpose in sheets and in the relay, and the test that sees it."""

from __future__ import annotations

from support.planted import Bug

C = "tests/collector/test_relay.py"
T = "tests/store"

SCALE = [
    Bug(
        "a scale that follows its amax takes no room",
        "sheet_codec:pack",
        "if np.count_nonzero(odd != odd[0]) < np.count_nonzero(words != words[0]):",
        "if bool((odd == odd[0]).all()):",
        "tests/store/test_sheets.py::test_a_scale_that_follows_its_amax_takes_no_room_though_not_all_do",
    ),
    Bug(
        "a relay answers when a body is on disk",
        "relay:Relay.post",
        "entry = self.journals.append(kind, session, seq, amount, body, urgent=urgent, held=held)",
        "entry, urgent = None, False",
        f"{C}::test_what_was_answered_outlives_the_relay_and_the_collector",
    ),
    Bug(
        "nothing leaves a relay before the collector has answered for it",
        "relay_forward:Forwarder._alone",
        "if receipt.verdict is not ResponseMeaning.ACKNOWLEDGED:",
        "if receipt.verdict is ResponseMeaning.HOLD:",
        f"{C}::test_what_was_answered_outlives_the_relay_and_the_collector",
    ),
    Bug(
        "a session shows its key to a relay",
        "relay:Relay.post",
        "if known.session.key != key:",
        "if False:",
        f"{C}::test_each_session_shows_its_key_and_each_client_the_token",
    ),
    Bug(
        "a relay asks for its own token",
        "relay:Relay.admits",
        "return token is None or",
        "return True or",
        f"{C}::test_each_session_shows_its_key_and_each_client_the_token",
    ),
    Bug(
        "a damaged frame of a relay's journal is not sent",
        "relay_journal:_entry_at",
        "if len(payload) != name + length or zlib.crc32(payload) != crc:",
        "if len(payload) != name + length:",
        f"{C}::test_a_journal_that_was_cut_or_damaged_is_read_as_far_as_it_is_intact",
    ),
    Bug(
        "each joined batch shows the key of its session",
        "ingest.joined:_one",
        'key_sha256=hashlib.sha256(key.encode()).hexdigest() if key else ""',
        "key_sha256=sender.key_sha256",
        f"{C}::test_of_joined_batches_each_is_answered_by_itself",
    ),
    Bug(
        "a sheet gives back what was put in",
        "sheet_codec:Unpacked.column",
        "            words ^= _BIAS[spec.dtype]\n",
        "            pass\n",
        f"{T}/test_sheets.py::test_what_comes_out_is_what_went_in",
    ),
    Bug(
        "a damaged sheet is told",
        "sheet_codec:unseal",
        "if check and zlib.crc32(memoryview(body)[4:]) != crc:",
        "if False:",
        f"{T}/test_sheets.py::test_damage_is_told",
    ),
    Bug(
        "blocks of an earlier collector are found in a roll-up",
        "rollup:_has_blocks",
        "return bool(num != cell.num_records)",
        "return False",
        f"{T}/test_migrations.py::test_blocks_of_a_release_take_late_records_and_other_ranks",
    ),
    Bug(
        "a cell of more than a thousand sources is read",
        "store.cell_records:of_keys",
        "    ranks: dict[int, list[int]] = {}\n",
        "    return sa.or_(*(sa.and_(c.attempt == a, c.rank == r) for a, r in keys))\n    ranks: dict[int, list[int]] = {}\n",
        f"{T}/test_sheets.py::test_a_cell_of_more_than_a_thousand_sources_is_read_before_it_is_rolled_up",
    ),
    Bug(
        "a cell of many ranks is rolled up when all of them are in",
        "compactor:Compactor._run",
        "if not group.more and (",
        "if (",
        f"{T}/test_sheets.py::test_a_cell_of_more_batches_than_a_round_takes_is_rolled_up_once[sqlite]",
    ),
]
