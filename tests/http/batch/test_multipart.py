"""Bodies of multipart/form-data: what clients of all kinds write, what is none, and what it costs."""

import time
from contextlib import suppress

import pytest

from aserve.core.errors import InvalidRequestError
from aserve.http.batch.multipart import MAX_FILENAME_CHARS, MAX_HEAD_BYTES, MAX_PARTS, parts_of

TYPE = "multipart/form-data; boundary=xyz"
DISPOSITION = b'Content-Disposition: form-data; name="file"; filename="a.jsonl"'


def one(head=DISPOSITION, content=b"1", before=b"", after=b""):
    """A body of one part."""
    return before + b"--xyz\r\n" + head + b"\r\n\r\n" + content + b"\r\n--xyz--" + after


@pytest.mark.parametrize(
    ("head", "filename"),
    [
        (b"Content-Disposition: form-data; name=file; filename=a.jsonl", "a.jsonl"),
        (b'content-disposition: FORM-DATA;Name = "file" ;FileName="a.jsonl";', "a.jsonl"),
        (b"Content-Disposition: form-data; name=file; filename*=UTF-8''a%20b%E2%82%AC.jsonl", "a b\u20ac.jsonl"),
        (b"Content-Disposition: form-data; name=file; filename=_; filename*=iso-8859-1'en'%E9", "\xe9"),
        (DISPOSITION + b'\r\nContent-Type: application/octet-stream; name="b"; filename="c"', "a.jsonl"),
        (b'Content-Type: text/plain; name="b"\r\n' + DISPOSITION, "a.jsonl"),
        (b'Content-Disposition: form-data;\r\n name="file";\r\n\tfilename="a.jsonl"', "a.jsonl"),
        (b'Content-Disposition: form-data; name="file"; filename="a\\"b.jsonl"', 'a"b.jsonl'),
        (b'Content-Disposition: form-data; name="file"; filename="C:\\\\x\\y; name=z"', "C:\\x\\y; name=z"),
        ('Content-Disposition: form-data; name="file"; filename="\u00e9"'.encode(), "\xe9"),
        (b'Content-Disposition: form-data; name="file"; filename=""', ""),
        (b'Content-Disposition: form-data; name="file"', None),
    ],
)
def test_heads_as_clients_write_them(head, filename):
    """Caught: uploads from .NET refused, and a field that had the name of another header's parameter."""
    [(name, part)] = parts_of(TYPE, one(head)).items()
    assert (name, part.filename, part.content) == ("file", filename, b"1")


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("multipart/form-data; charset=utf-8; boundary=xyz", one()),
        ('Multipart/Form-Data; Boundary="xyz"; charset=utf-8;', one()),
        (TYPE, one(before=b"a preamble\r\n")),
        (TYPE, one(before=b"\r\n")),
        (TYPE, one(after=b"\r\n")),
        (TYPE, one(after=b"\r\nan epilogue\r\n--xyz\r\nx")),
        (TYPE, one().replace(b"--xyz\r\n", b"--xyz \t\r\n")),
    ],
)
def test_bodies_as_clients_write_them(content_type, body):
    assert [(name, part.content) for name, part in parts_of(content_type, body).items()] == [("file", b"1")]


@pytest.mark.parametrize(
    ("content_type", "body", "told"),
    [
        ("multipart/form-data", one(), "must name a boundary, as RFC 2046 has it: none is given"),
        (f"multipart/form-data; boundary={'x' * 71}", one(), "must name a boundary"),
        ('multipart/form-data; boundary="x', one(), "the header Content-Type cannot be read"),
        ("multipart/mixed; boundary=xyz", one(), "must be multipart/form-data, got 'multipart/mixed'"),
        (TYPE, b"--xyz\r\nContent-Disposition: form-data\r\n--xyz--", "a part of the body has headers without an end"),
        (TYPE, b"--abc--", "has not the boundary"),
        (TYPE, one(b"A: b; name=file"), "a part of the body has no name"),
        (TYPE, one(b'Content-Disposition: form-data; name="file'), "Content-Disposition of a part cannot be read"),
        (TYPE, one(b"Content-Disposition: form-data; name=file; filename*=x"), "filename\\* must be UTF-8''"),
        (
            TYPE,
            one(b"Content-Disposition: form-data; name=file; filename=" + b"a" * 600),
            f"file: its filename has 600 characters, and at most {MAX_FILENAME_CHARS} are allowed",
        ),
        (TYPE, one(b"A: " + b"b" * MAX_HEAD_BYTES), f"headers of over {MAX_HEAD_BYTES} bytes"),
    ],
)
def test_what_is_none_says_why(content_type, body, told):
    with pytest.raises(InvalidRequestError, match=told):
        parts_of(content_type, body)


@pytest.mark.parametrize("filling", [b"\r\n--xy", b'\\"', b"; ", b"\r\n ", b"a=b;", b" ", b"a", b'a="'])
def test_no_body_costs_more_than_its_length(filling):
    """Catches a pattern that goes back over what it has read."""
    long, start_s = filling * (2**20 // len(filling)), time.process_time()
    head = DISPOSITION + b"; x=" + long[: MAX_HEAD_BYTES - 80]
    for kind, body in ((TYPE, one(content=long)), (TYPE, one(head)), (TYPE + "; x" + long.decode()[:65536], one())):
        with suppress(InvalidRequestError):
            parts_of(kind, body)
    assert time.process_time() - start_s < 0.2


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b""),
        ("multipart/form-data; boundary=x", b"nothing"),
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1'),
        ("multipart/form-data; boundary=x", b"--x\r\n\r\n1\r\n--x--"),
        ("multipart/form-data; boundary=x", b'--x\r\nA: name="a"\r\n\r\n' * 40 + b"--x--"),
    ],
)
async def test_what_is_no_upload_is_a_400(client, content_type, body):
    response = await client.post("/v1/files", content=body, headers={"content-type": content_type})
    assert response.status_code == 400


def test_a_files_bytes_are_kept_as_they_are():
    content = bytes(range(256)) + b"\r\n--y\r\n\n"
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a b"\r\n\r\n'
    parts = parts_of('multipart/form-data; boundary="x"', head + content + b"\r\n--x--\r\n")
    assert (parts["file"].content, parts["file"].filename) == (content, "a b")


def test_an_upload_has_so_many_parts_and_no_more():
    def body(num_parts):
        parts = (f'--x\r\nContent-Disposition: form-data; name="{i}"\r\n\r\n{i}\r\n' for i in range(num_parts))
        return "".join(parts).encode() + b"--x--\r\n"

    parts = parts_of("multipart/form-data; boundary=x", body(MAX_PARTS))
    assert [part.content for part in parts.values()] == [b"%d" % i for i in range(MAX_PARTS)]
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_PARTS} parts"):
        parts_of("multipart/form-data; boundary=x", body(MAX_PARTS + 1))
