"""Says whether a name is that of a secret, and whether a value beside such a name is one. Pure."""

from __future__ import annotations

import re
from functools import lru_cache

from ddplaunch.system.redaction.shapes import is_random

HIDDEN = "..."  # in place of a value that is shown nowhere
LONGEST_NAME = 100  # characters of a name that are looked at, the last ones

# what each name of a secret has in it, so that most names need no closer look
SECRET_PARTS = ("token", "secret", "pass", "pw", "cred", "key", "auth", "cookie", "jwt", "webhook", "bearer", "pat")
_WORD = r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+"
# words that say nothing of what a value is: they are dropped from the end of a name
_SAYING_NOTHING = frozenset((
    "value", "val", "str", "string", "text", "plain", "plaintext", "raw", "b64", "base64", "default", "encoded", "new",
    "old", "prod", "dev", "test", "staging", "main", "my",
))  # fmt: skip
# a name that ends so says where a secret is, or of what kind
_FACTS_ABOUT_SECRETS = frozenset((
    "file", "files", "path", "paths", "dir", "directory", "folder", "location", "name", "names", "ref", "refs", "url",
    "uri", "endpoint", "host", "env", "var", "variable", "variables", "id", "ids", "type", "types", "kind", "count",
    "counts", "counter", "len", "length", "limit", "budget", "size", "sizes", "num", "number", "dim", "dims", "index",
    "idx", "idxs", "pos", "position", "positions", "embedding", "embeddings", "embed", "embeds", "emb", "embs", "dropout",
    "drop", "mask", "masks", "level", "rate", "loss", "acc", "accuracy", "logits", "logit", "probs", "prob", "logprob",
    "logprobs", "weight", "weights", "freq", "usage", "bucket", "pad", "padding", "mapping", "stream", "generator",
    "spec", "span", "spans", "list", "set", "class", "cls", "batch", "shift", "mixer", "mixing", "merging", "pruning",
    "merge", "ttl", "expiry", "expires", "expiration", "timeout", "policy", "manager", "store", "provider", "backend",
    "enabled", "required", "prompt", "hint", "min", "max", "map", "ratio", "per", "throughput", "seconds", "second",
    "sec", "hash", "digest", "format", "version", "mode", "method", "callback", "fn", "func", "function", "scope",
    "scopes", "error", "errors", "field", "fields", "header", "column", "strategy", "classification", "parallel",
))  # fmt: skip
# a name with one of these counts or bounds something: a number beside it is no secret
_COUNTING = frozenset(("max", "min", "num", "number", "count", "total", "per", "limit"))
# a name that ends so measures something, as one that tells of a secret may
_MEASURING = frozenset((
    "window", "chunk", "chunks", "capacity", "width", "height", "depth", "step", "steps", "bits", "bytes", "rounds", "interval",
    "lifetime", "age", "expire", "minutes", "hours", "days", "ms", "retries", "attempts", "delay", "port", "threshold",
))  # fmt: skip
# of these the id is as secret, or useless to hide but for what it is beside
_WITH_SECRET_ID = frozenset(("key", "secret"))
_PASSWORDS = frozenset((
    "password", "passwords", "passwd", "passphrase", "passcode", "secret", "secrets", "credential", "credentials",
    "creds", "passwort", "userpassword",
))  # fmt: skip
_PASSWORD_ENDINGS = ("password", "passwd", "passphrase", "secret", "credentials")
_KEY_ENDINGS = (
    "apikey",
    "secretkey",
    "accesskey",
    "privatekey",
    "encryptionkey",
    "signingkey",
    "authkey",
    "accountkey",
)
_BEFORE_KEY = frozenset((
    "api", "access", "secret", "private", "encryption", "encrypt", "signing", "sign", "auth", "account", "shared",
    "master", "service", "deploy", "client", "storage", "app", "application", "webhook", "ssh", "gpg", "pgp", "aes",
    "hmac", "rsa", "license", "subscription", "wandb", "openai", "hf", "huggingface", "anthropic", "aws", "gcp", "azure",
    "google", "github", "gitlab", "comet", "neptune", "mlflow", "stripe", "cookie", "jwt", "crypto", "admin", "consumer",
    "ssl", "tls", "fernet", "refresh", "vault", "server", "s3", "minio", "host", "kaggle",
))  # fmt: skip
_BEFORE_PASS = frozenset((
    "db", "database", "user", "smtp", "mail", "email", "ftp", "login", "admin", "root", "redis", "mysql", "postgres",
    "pg", "mongo", "rabbitmq", "ldap", "ssh", "sudo", "become", "proxy",
))  # fmt: skip
# words before "token": the token is one of a text, not of a login
BEFORE_TEXT_TOKEN = frozenset((
    "max", "min", "num", "n", "no", "pad", "eos", "bos", "unk", "cls", "sep", "mask", "masked", "special", "image",
    "video", "audio", "next", "last", "first", "per", "prev", "previous", "stop", "start", "end", "begin", "text",
    "patch", "vision", "visual", "query", "target", "source", "src", "tgt", "input", "output", "add", "register", "each",
    "total", "sub", "word", "char", "byte", "single", "every", "any", "current", "cur", "generated", "prompt",
    "completion", "expected", "unexpected", "invalid", "pred", "predicted", "eot", "eod", "eom", "sos", "learnable",
    "class", "global", "prefix", "suffix", "bad", "good", "tool", "think", "mem", "memory", "latent", "noise", "task", "lang",
    "language", "domain", "sentinel", "separator", "newline", "blank", "space", "null", "empty", "gist", "answer", "label",
    "reg", "draft", "fim", "soft", "time", "action", "illegal", "unknown",
))  # fmt: skip
_BEFORE_LOGIN_TOKENS = frozenset((
    "access", "api", "auth", "secret", "bearer", "refresh", "github", "gitlab", "hf", "id", "session", "security",
))  # fmt: skip


@lru_cache(1024)
def is_secret(name: str) -> bool:
    """Whether a variable, option or field of this name holds a secret: HF_TOKEN, --api-key, dbPassword, not max_tokens."""
    lowered = name[-LONGEST_NAME:].lower()
    if not any(part in lowered for part in SECRET_PARTS):
        return False
    words = _words(name)
    if not words:
        return False
    if "webhook" in words or lowered.endswith("webhook"):
        return True
    if _names_fact_about_secret(words):  # token_file
        return False
    return any(_makes_name_secret(words, at, is_constant=name.isupper()) for at in range(len(words)))


def _names_number(name: str) -> bool:
    """Whether the name of a secret is rather one of a number: TOKEN_PER_GPU, max_new_token, WEBHOOK_PORT."""
    words = _words(name)
    return any(word in _COUNTING for word in words) or words[-1] in _MEASURING or _names_fact_about_secret(words)


def _names_password(name: str) -> bool:
    """Whether any number beside this name may be a secret, whatever else the name says: MIN_PASSWORD, N8N_SECRET."""
    lowered = name.lower()
    return any(part in lowered for part in ("passw", "passphrase", "passcode", "pwd", "secret"))


def _words(name: str) -> list[str]:
    """Return the words of a name in lower case, of hf_token and dbPassword too, without those at its end that say nothing."""
    words = [word.lower() for word in re.findall(_WORD, name[-LONGEST_NAME:])]
    while len(words) > 1 and words[-1] in _SAYING_NOTHING:
        words.pop()
    return words


def _names_fact_about_secret(words: list[str]) -> bool:
    """Whether a name of these words is that of a fact about a secret, by its end: token_file, but not secret_key_id."""
    is_secret_id = len(words) > 1 and words[-1] == "id" and words[-2] in _WITH_SECRET_ID
    return words[-1] in _FACTS_ABOUT_SECRETS and not is_secret_id


def _makes_name_secret(words: list[str], at: int, *, is_constant: bool) -> bool:
    """Whether the word at `at` of a name makes the name that of a secret; `is_constant`: the name is in capitals."""
    word, before, is_last = words[at], words[at - 1] if at else "", at == len(words) - 1
    if word in _PASSWORDS or word.endswith((*_PASSWORD_ENDINGS, *_KEY_ENDINGS)) or word in ("jwt", "authorization"):
        return True
    if word.endswith("token"):  # TOKEN_GITHUB, but not TokenClassificationOutput
        return (word.removesuffix("token") or before) not in BEFORE_TEXT_TOKEN and (is_last or is_constant)
    if word == "tokens":
        return before in _BEFORE_LOGIN_TOKENS
    if word == "keys":
        return is_last and before in ("api", "access", "secret", "private")
    if word == "key":
        return before in _BEFORE_KEY and (is_last or words[at + 1] == "id")
    if not is_last:
        return False
    match word:
        case "auth" | "pwd" | "pw" | "cookie" | "cookies" | "bearer":
            return True
        case "pass":
            return before in _BEFORE_PASS
        case "pat":  # personal access token
            return before in ("github", "gh", "gitlab", "azure", "ado")
    return False


_WORDS_FOR_NO_SECRET = frozenset((
    "none", "null", "nil", "true", "false", "yes", "no", "on", "off", "undefined", "nan", "default", "required",
    "optional", "str", "int", "float", "bool", "bytes", "object", "any", "dict", "list", "tuple", "string", "number",
    "boolean", "text", "secretstr", "path", "auto", "token", "tokens", "password", "secret", "passwd", "key", "hidden",
    "redacted", "masked", "todo", "munge", "basic", "digest", "kerberos", "gssapi", "negotiate", "ntlm", "oauth2", "ldap",
    "anonymous", "shared",
))  # fmt: skip
# what stands for a value: $NAME, ${NAME}, {name}, <name>, %(name)s, [PAD], @NAME@, xxxx, ***, "..."
_PLACEHOLDER = (
    r"\$(?:[A-Za-z_]\w*|\d|[({].*)?|%\(.*|%[sr]|[{]{1,2}[^{}]*[}]{1,2}|<[^<>]*>|\[[A-Za-z_ ]*\]|[A-Z_]*\$?\{[^{}]*\}|@\w+@"
    r"|!(?:vault|secret|env\w*|Ref|Sub)\b.*|[xX]+|[*._#?-]+|\.\.\..*"
)
_LONGEST_LOOKED_AT = 1000  # characters of a value
_PATH = r"(?:~|\.{1,2}|[A-Za-z]:)?(?:[/\\][\w.@+ -]*)+"
_FILE = r"(?:[\w.-]+/)*[\w.-]+\.(?:txt|json|ya?ml|toml|pem|key|crt|pub|env|ini|cfg|py|sh|log|pt|bin|model|md|csv)"


def is_value(text: str, name: str) -> bool:
    """Whether a text beside the name of a secret is a secret: no placeholder, path, type or switch, and no count."""
    text = text.strip()
    if not text or text.lower() in _WORDS_FOR_NO_SECRET:
        return False
    if len(text) < _LONGEST_LOOKED_AT and re.fullmatch(_PLACEHOLDER, text, re.DOTALL):
        return False
    is_short_number = len(text) < 12 and re.fullmatch(r"[-+]?[\d_.]+(?:e[-+]?\d+)?", text)
    if is_short_number and _names_number(name) and not _names_password(name):
        return False
    if re.fullmatch(_FILE, text[:_LONGEST_LOOKED_AT]):
        return False
    return is_random(text) or not re.fullmatch(_PATH, text[:_LONGEST_LOOKED_AT])  # base64 has slashes, too
