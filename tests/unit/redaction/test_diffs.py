"""A diff of git: each file by its language, nothing of a file that is a secret, whatever its length."""

from __future__ import annotations

import time

import pytest

from ddplaunch.system.redaction import Redactor, diff


def changed(name: str, *lines: str, before: str = "") -> str:
    header = f"diff --git a/{before or name} b/{name}\n--- a/{before or name}\n+++ b/{name}\n@@ -1,3 +1,9 @@ def f():\n"
    return header + "".join(f"{line}\n" for line in lines)


def shown(text: str, most: int = 64_000) -> str:
    return diff(text, Redactor(), most)


@pytest.mark.parametrize(
    "name",
    [".env", ".env.local", "prod.env", "a/.netrc", ".npmrc", "k/id_rsa", "id_ed25519", "x.pem", "tls.key", "credentials",
     "aws_credentials.json", "secrets.yaml", ".docker/config.json", ".kube/config", "store.p12", "service-account-1.json",
     "token.txt", "terraform.tfvars", ".pgpass"],
)  # fmt: skip
def test_a_file_of_secrets_is_hidden_as_a_whole(name: str) -> None:
    text = changed(name, "+hush=1") + changed("a.py", "+x")
    assert shown(text) == f"diff --git a/{name} b/{name}\n...\n" + changed("a.py", "+x")


def test_a_file_of_secrets_that_got_another_name_is_one_still() -> None:
    assert "hush" not in shown(changed("settings.txt", "+hush", before=".env"))


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "keyboard.py", "train.py", "monkey.yaml", "environment.yml", "docs/tokens.md"]
)
def test_another_file_stays(name: str) -> None:
    text = changed(name, "+lr: 1", "-lr: 2", " x")
    assert shown(text) == text


def test_a_word_without_quotes_is_a_name_in_code_and_a_value_in_settings() -> None:
    assert shown(changed("a.py", "+password = hunter")).endswith("+password = hunter\n")
    assert shown(changed("a.yaml", "+password: hunter hunts")).endswith("+password: ...\n")
    assert shown(changed("a.ini", "+password = hunter hunts  ; ours")).endswith("+password = ...  ; ours\n")
    assert shown(changed("run.sh", "+export TOKEN=hush")).endswith("+export TOKEN=...\n")
    assert "hush" not in shown(changed("a.py", '+run("export TOKEN=hush")', '+url = "host=a password=hush"'))


def test_a_value_that_goes_on_in_the_next_line_of_the_diff_is_hidden() -> None:
    lines = ["+token = (", '+    "hush"', '+    "hush"', "+)", "+key = 1"]
    assert "hush" not in shown(changed("a.py", *lines))
    assert shown(changed("a.py", *lines)).endswith("+)\n+key = 1\n")
    assert "hush" not in shown(changed("a.yaml", "+a:", "+  token: |", "+    hush", "+    hush", "+b: 1"))
    assert "+b: 1" in shown(changed("a.yaml", "+a:", "+  token: |", "+    hush", "+    hush", "+b: 1"))


def test_a_key_is_hidden_of_which_a_hunk_has_only_a_part() -> None:
    body = ["+hushhushhushhush/hush+hush" for _ in range(3)]
    assert "hush" not in shown(changed("a.py", "+-----BEGIN OPENSSH PRIVATE KEY-----", *body))
    assert "hush" not in shown(changed("a.py", *body, "+-----END OPENSSH PRIVATE KEY-----"))
    text = changed("a.py", "+-----BEGIN OPENSSH PRIVATE KEY-----", *body, "@@ -40 +40 @@", "+lr = 1")
    assert "+lr = 1" in shown(text)


def test_the_rest_of_a_file_that_nobody_can_name_is_left_out() -> None:
    assert shown("+hush\n" + changed("a.py", "+x")) == changed("a.py", "+x")
    assert shown("+hush\n+hush\n") == ""
    assert shown("") == ""


def test_ten_megabytes_take_no_longer_than_what_is_kept_of_them() -> None:
    text = changed("a.py", *["+token = 'hush' # and more of it"] * 300_000) + changed("b.py", "+x" * 1_000_000)
    began = time.process_time()
    kept = shown(text)
    assert time.process_time() - began < 5
    assert len(kept) == 64_000
    assert "hush" not in kept
