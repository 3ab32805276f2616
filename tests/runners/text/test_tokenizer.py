"""Text that grows by whole characters, whatever the tokens; stop strings across tokens; ends of a text."""

import json
import random
import threading

import pytest
import tokenizers
from tokenizers.decoders import ByteFallback, Fuse, Replace, Sequence, Strip
from tokenizers.models import WordLevel

from ling3export.artifacts.manifest import file_record
from ling3export.foundation.errors import ArtifactError
from ling3export.runners.text.tokenizer import TokenizerFiles
from ling3export.runners.text.vocabulary import TextStream, Tokenizer
from ling3export.verify.measure import check_tokenizer
from tests.support.short_chats import write_short

EOS = 2044


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_short(folder, EOS)
    return (folder / "tokenizer.json").read_text()


@pytest.fixture(scope="module")
def tokenizer(data):
    return Tokenizer(data.encode())


def pieces(stream, ids):
    return [*(stream.push(token) for token in ids), stream.finish()]


@pytest.mark.parametrize("kind", ["bytes", "any", "text"])
def test_a_stream_says_what_decoding_at_once_says(tokenizer, kind):
    rng = random.Random(kind)
    for _ in range(100):
        if kind == "text":
            ids = tokenizer.encode("héllo wörld 🎉🎉 日本語 of the " * 3)[rng.randrange(8) :]
        else:
            ids = [rng.randrange(256 if kind == "bytes" else EOS + 4) for _ in range(rng.randrange(80))]
        assert "".join(pieces(tokenizer.stream(), ids)) == tokenizer.decode(ids)


def test_no_piece_holds_half_a_character(tokenizer):
    ids = tokenizer.encode("日本語🎉é")
    assert pieces(tokenizer.stream(), ids) == ["", "", "日", "", "", "本", "", "", "語", "", "", "", "🎉", "", "é", ""]


def letters(decoder, words):
    """A tokenizer whose ids are the positions of ``words``."""
    made = tokenizers.Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, words[0]))
    made.decoder = decoder
    return made


@pytest.mark.parametrize("text", ["日本語🎉é.", "a日b", "🎉🎉", "x"])
def test_no_half_where_a_decoder_writes_one_mark_a_byte(text):
    """A decoder that falls back to bytes writes a mark for each byte of an incomplete character."""
    decoder = Sequence([ByteFallback(), Fuse()])
    parts = pieces(TextStream(letters(decoder, [f"<0x{byte:02X}>" for byte in range(256)])), text.encode() * 3)
    assert "".join(parts) == text * 3
    assert all("�" not in part for part in parts)


def test_words_keep_the_spaces_between_them_where_the_first_one_is_dropped():
    """Such as SentencePiece's decoders. Regression: a stream that decoded windows of tokens lost one space in each."""
    decoder = Sequence([Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    made = letters(decoder, ["▁one", "▁word", "s", "▁", "<0xE6>", "<0x97>", "<0xA5>"])
    rng = random.Random(0)
    for _ in range(100):
        ids = [token for _ in range(60) for token in rng.choice([[0], [1], [2], [3], [4, 5, 6]])]
        assert "".join(pieces(TextStream(made), ids)) == made.decode(ids)


def test_bytes_that_are_no_text_change_nothing_else():
    """The library's stream fails if a byte changes how earlier ones are decoded; ours continues."""
    made = letters(Sequence([ByteFallback(), Fuse()]), ["A", *(f"<0x{byte:02X}>" for byte in range(256))])
    rng = random.Random(0)
    for _ in range(200):
        ids = [rng.choice([0, 0, 1 + 195, 1 + 169, 1 + 230, 1 + 151, 1 + 255]) for _ in range(rng.randrange(40))]
        found = "".join(pieces(TextStream(made), ids))
        assert found.count("A") == ids.count(0)


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer):
    assert pieces(tokenizer.stream(), tokenizer.encode("a日")[:-1]) == ["a", "", "", "�"]


@pytest.mark.parametrize(
    ("stop", "shown"),
    [
        (["lo w"], "hel"),
        (["world", "wor"], "hello "),
        (["\nQ", "xx"], "hello world\nA"),
        (["Z"], "hello world\nA\nQ: of"),
    ],
)
def test_a_stop_string_is_found_across_tokens_and_never_shown(tokenizer, stop, shown):
    stream = tokenizer.stream(stop)
    parts = pieces(stream, tokenizer.encode("hello world\nA\nQ: of"))
    assert "".join(parts) == shown
    assert stream.stopped == (stop != ["Z"])


def test_the_beginning_of_a_stop_string_is_held_back_until_it_fails():
    stream = TextStream(letters(Fuse(), [chr(place) for place in range(128)]), ["abcd"])
    assert pieces(stream, b"xabcabcx") == ["x", "", "", "", "abc", "", "", "abcx", ""]


def test_a_broken_tokenizer_is_a_clear_error():
    with pytest.raises(
        ArtifactError, match=r"tokenizer `tokenizer/tokenizer.json`: expected one that `tokenizers` reads"
    ):
        Tokenizer(b'{"model": 1}', "tokenizer/tokenizer.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}],
                    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
                    "special_tokens": {},
                }
            },
            "found no entry found for key",
        ),
        ({"model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                    "max_input_chars_per_word": 9}}, "found WordPiece error: Missing"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 1 << 31}, "unk_token": "a"}}, "below 16,777,216, found 2,147"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_fails_at_the_first_text_is_refused_at_build(data, tmp_path, change, message):
    """Regression: a panic of the library, an error for each unknown word, and a missing tokenizer for grammars."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(json.loads(data) | {"added_tokens": []} | change))
    with pytest.raises(ArtifactError) as caught:
        check_tokenizer(tmp_path, [file_record(tmp_path, "tokenizer.json")])
    assert message in caught.value.message


def artifact(folder, eos, **files):
    (folder / "tokenizer").mkdir()
    write_short(folder / "tokenizer", EOS)
    for name, value in files.items():
        (folder / "tokenizer" / f"{name}.json").write_text(json.dumps(value))
    records = [file_record(folder, f"tokenizer/{path.name}") for path in sorted((folder / "tokenizer").iterdir())]
    return TokenizerFiles(folder, records, eos)


@pytest.mark.parametrize(
    ("eos", "files", "expected"),
    [
        ([7], {}, {7, EOS}),
        ([7], {"generation_config": {"eos_token_id": [8, 9]}}, {7, 8, 9, EOS}),
        (
            [7],
            {"generation_config": {"eos_token_id": 8}, "tokenizer_config": {"eos_token": {"content": "<role>"}}},
            {7, 8, EOS + 2},
        ),
        ([7], {"tokenizer_config": {"eos_token": "no such token"}}, {7}),
        ([7], {"tokenizer_config": {}}, {7}),
    ],
)
def test_a_text_ends_at_any_id_that_a_file_names(tmp_path, eos, files, expected):
    assert artifact(tmp_path, eos, **files).eos_token_ids() == expected


def test_a_changed_tokenizer_file_is_not_used(tmp_path):
    files = artifact(tmp_path, [7])
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b"of", b"fo", 1))
    with pytest.raises(ArtifactError, match=r"file `tokenizer/tokenizer.json`: expected sha256"):
        files.tokenizer("text in")


def test_other_threads_run_while_a_text_is_tokenized(tokenizer):
    """Regression: the library's function for one text blocks all threads: a text of 4 MB stopped a server for 15 s."""
    text = "".join(random.Random(0).choices("abcdefgh ij", k=300_000))
    turns, ended = 0, threading.Event()

    def count():
        nonlocal turns
        while not ended.wait(0.001):
            turns += 1

    counter = threading.Thread(target=count)
    counter.start()
    before = turns
    tokenizer.encode(text)
    after = turns
    ended.set()
    counter.join()
    assert after - before > 20


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("tokenizer_config.json", "[" * 10**6, "found more than 16 levels of objects and lists"),
        ("tokenizer_config.json", '{"eos_token": "\\ud800"}', "found half a character"),
        ("tokenizer_config.json", '{"eos_token": 1e999}', "found a number beyond the largest"),
        ("tokenizer_config.json", "[]", "found no object"),
        ("generation_config.json", '{"eos_token_id": 1, "eos_token_id": 3}', "found a key that stands twice"),
        ("generation_config.json", '{"eos_token_id": NaN}', "found the number NaN"),
    ],
)
def test_a_file_of_strange_json_is_an_error_that_names_it(tmp_path, name, text, found):
    """Regression: deep JSON was a RecursionError, and a lone surrogate as ``eos_token`` a UnicodeEncodeError."""
    write_short(tmp_path, EOS)
    (tmp_path / name).write_text(text)
    records = [file_record(tmp_path, path.name) for path in tmp_path.iterdir()]
    with pytest.raises(ArtifactError, match=f"tokenizer file `{name}`: expected JSON, {found}"):
        TokenizerFiles(tmp_path, records).eos_token_ids()


def test_templates_of_other_types_are_no_template(tmp_path):
    write_short(tmp_path, EOS)
    for value in ([{"name": [], "template": "x"}], [3], [], None):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        records = [file_record(tmp_path, path.name) for path in tmp_path.iterdir()]
        assert not TokenizerFiles(tmp_path, records).chats
