from __future__ import annotations

import pytest

from lit_stable.data.documents import Document, TextFiles


def test_a_text_file_is_a_document_and_files_come_sorted(tmp_path):
    (tmp_path / "b.txt").write_bytes(b"second\r\n")
    (tmp_path / "a.md").write_text("first")
    files = TextFiles([tmp_path / "*"], source="notes")
    assert list(files) == [Document("first", "notes"), Document("second\r\n", "notes")]
    assert list(files) == list(files)


def test_a_file_named_twice_is_read_once(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    assert len(list(TextFiles([tmp_path / "a.txt", tmp_path / "*.txt"], source="s"))) == 1


def test_patterns_descend_into_folders(tmp_path):
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "sub" / "deep" / "a.txt").write_text("x")
    assert len(list(TextFiles([tmp_path / "**" / "*.txt"], source="s"))) == 1


def test_a_name_with_pattern_characters_is_a_file_first(tmp_path):
    (tmp_path / "a[1].txt").write_text("x")
    assert len(list(TextFiles([tmp_path / "a[1].txt"], source="s"))) == 1


def test_a_separator_cuts_a_text_file_into_documents(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree")
    assert [document.text for document in TextFiles([tmp_path / "a.txt"], "s", "\n\n")] == ["one", "two", "three"]


def test_jsonl_lines_carry_source_and_date(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a", "source": "web", "date": "2024-02-29T12:00:00Z", "more": 1}\n'
        "\n"
        '{"text": "b", "date": 19991231}\n'
        '{"text": "c"}'
    )
    assert list(TextFiles([tmp_path / "a.jsonl"], source="s")) == [
        Document("a", "web", 20240229),
        Document("b", "s", 19991231),
        Document("c", "s", 0),
    ]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "Expecting property name"),
        ("[1]", 'must be a JSON object with a string "text"'),
        ('{"text": 3}', 'must be a JSON object with a string "text"'),
        ('{"text": "a\\ud800"}', '"text" holds half of a surrogate pair'),
        ('{"text": "a", "source": 3}', "source=3 must be a string"),
        ('{"text": "a", "date": "yesterday"}', "date='yesterday' must be YYYY-MM-DD or yyyymmdd"),
        ('{"text": "a", "date": "2024-13-01"}', "date='2024-13-01' must be"),
    ],
)
def test_bad_lines_are_counted_and_the_first_is_shown_with_file_and_line(tmp_path, line, problem):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "good"}}\n{line}\n{{"text": "good"}}\n{line}\n')
    documents = iter(TextFiles([tmp_path / "a.jsonl"], source="s"))
    assert [next(documents).text, next(documents).text] == ["good", "good"]
    with pytest.raises(ValueError, match=r"a\.jsonl:2: .*\(2 bad lines in all\); correct them") as error:
        next(documents)
    assert problem in str(error.value)


def test_inputs_that_match_nothing_are_all_told(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match=r"input gone\.txt, no/\*\.md: matches no file"):
        TextFiles(["gone.txt", tmp_path / "a.txt", "no/*.md"], source="s")
    with pytest.raises(ValueError, match=r"input \(none\): matches no file"):
        TextFiles([], source="s")


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"a\.txt: is not UTF-8 text \(invalid start byte at byte 2\)"):
        list(TextFiles([tmp_path / "a.txt"], source="s"))
