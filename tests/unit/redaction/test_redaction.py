"""Secrets are hidden whatever the syntax, what only looks like one stays, and no text takes long: a table, and properties."""

from __future__ import annotations

import re
import string
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddplaunch.system.redaction import HIDDEN, Redactor, Syntax, is_secret, literals

LONG = "kQ7wZp2Rt9LmXv4BnYs8Hd3JfGc6Ta1Ue5Oi0Pq"
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"
PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhush\nhushAASC+/x==\n-----END PRIVATE KEY-----"

# each holds "hush", or what is given beside it; none of that may be left
HIDES = [
    # Python
    'os.environ["X_TOKEN"] = "hush"', "os.environ['X_TOKEN']='hush'", 'environ.setdefault("HF_TOKEN", "hush")',
    'os.environ.get("HF_TOKEN", "hush")', 'os.getenv("API_KEY", "hush")', 'os.putenv("DB_PASSWORD", "hush")',
    'password = "hush"',
    "password: str = 'hush'", "token: str | None = 'hush'", 'def f(a, token="hush"):',
    'def f(*, api_key: Optional[str] = "hush") -> None:',
    "login(token='hush')", '{"api_key": "hush"}', "dict(secret='hush')", "('password', 'hush')", 'token = f"hush{x}"',
    'secret = b"hush"',
    'if password == "hush":', "self.api_key = 'hush'", 'token = (\n    "hush"\n    "hush too"\n)', 'token = "hu" + "hush"',
    'token = \\\n    "hush"', 'password = """hush\nhush"""', 'token = SecretStr("hush")',
    'wandb.login(key="1", api_key="hush")',
    'parser.add_argument("--token", default="hush")', 'parser.add_argument("--hf-token", type=str, help="it", default="hush")',
    'requests.get(u, auth=("me", "hush"))', 'headers = {"Authorization": "Bearer hush"}', 'headers = {"X-Api-Key": "hush"}',
    'client = OpenAI(api_key="hush", timeout=3)', "pytorchToken = 'hush'", 'const apiKey = "hush";', 'token := "hush"',
    "token => 'hush'",
    # settings
"password = hush", "Password: hush", "hf_token: hush", "  api_key: 'hush'", "secret: >-\n    hush\n    hush\nb: 1",
    "password: |\n  hush\n", 'api_key = "hush"', '"secret": "hush"', '"token":\n  "hush"', 'token = """\nhush\n"""',
    "db.password=hush",
    "[x]\naws_secret_access_key = hush/hush+hush", "spring.datasource.password: hush", "- name: HF_TOKEN\n  value: hush",
    '{"name": "HF_TOKEN", "value": "hush"}', "<password>hush</password>", '<add key="ApiPassword" value="hush"/>',
    "DB_PASS=hush",
    "//registry.npmjs.org/:_authToken=hush", "_auth=hush", "machine github.com login me password hush", "redis_pwd: hush",
    # shells and command lines
    "export HF_TOKEN=hush", "export HF_TOKEN='hush'", 'HF_TOKEN="hush" python t.py', "HF_TOKEN=hush python t.py",
    "set -x; API_KEY=hush ./x",
    "setenv HF_TOKEN hush", "ENV HF_TOKEN hush", "ENV HF_TOKEN=hush", "ARG PASSWORD=hush", "train.py --token hush --lr 1",
    "train.py --api-key=hush", "train.py wandb.api_key=hush", "train.py +wandb.api_key=hush", 'train.py --token "hush hush"',
    "docker run -e HF_TOKEN=hush image", 'curl -H "Authorization: Bearer hush" x', "curl -H 'X-Api-Key: hush1' x",
    "PET_RDZV_CONF=password=hush", "--env HF_TOKEN=hush", "error: --hf-token=hush is not an option",
    # URLs and connection strings
    "postgres://me:hush@host/db", "https://me:hush@host/", "redis://:hush@host", "mongodb+srv://u:hush@h/x?y=1",
    "u://me:hu/hush@host",
    "https://x/y?a=1&token=hush&b=2", "https://x/y?sig=hush", "https://s3/x?X-Amz-Signature=hush",
    "Server=a;Password=hush;Db=c",
    "DefaultEndpointsProtocol=https;AccountKey=hush;", "host=h user=u password=hush dbname=d", "amqp://u:hush@h//",
    "https://h/?api_key=hush",
    "https://hooks.slack.com/services/T0hush/B0hush/hush", "https://discord.com/api/webhooks/123/hush",
    "Authorization: Basic hush",
    "Cookie: session=hush", "Set-Cookie: id=hush", "password: hush=hush", "secret: hushhush=",
    # commands, SQL, other languages
    "sshpass -p hush ssh a", "mysql -u root -phush db", "curl -u me:hush https://x", "redis-cli -a hush",
    "docker login -u me -p hush",
    "wandb login hush", "echo hush | docker login --password-stdin", "aws configure set aws_secret_access_key hush",
    "openssl enc -pass pass:hush", 'ssh-keygen -N "hush"', "ALTER USER me WITH PASSWORD 'hush';",
    "CREATE USER me IDENTIFIED BY 'hush'",
    'wandb.login(key="hush")', 'huggingface_hub.login("hush")', '#define API_KEY "hush"', 'password <- "hush"',
    "set -gx HF_TOKEN hush",
    'token = args.token or "hush"', 'token = os.environ.get("HF_TOKEN") or "hush"', 'secret = "hush" if x else "hush"',
    'os.environ.update({"HF_TOKEN": "hush"})', 'monkeypatch.setenv("HF_TOKEN", "hush")', 'TOKEN: Final[str] = "hush"',
    'cmd = ["--hf-token", "hush", "--lr", "1"]', 'PASSWORDS = ["hush", "hush"]', '{"user": "me", "pw": "hush"}',
    "define('DB_PASSWORD', 'hush');",
    '<entry key="db.password">hush</entry>', "machine api.wandb.ai\n  login user\n  password hush", "logger={api_key:hush1}",
    "git clone https://oauth2:hush@gitlab.com/a/b", "sbatch --export=ALL,HF_TOKEN=hush x", "Cookie: a=hush; b=hush",
    "const token = `hush`;",
    # each of these was missed once
    'parser.add_argument(\n    "--hf-token",\n    type=str,\n    default="hush",\n)',
    "api_key: str = field(default='hush', repr=False)",
    'user, password = "me", "hush"', 'smtp.login("me", "hush")', 'run(["wandb", "login", "hush"])', 'API_KEYS = ["hush", "hush"]',
    "extraheader = AUTHORIZATION: basic hush", "curl -b 'session=hush' x", "ldapsearch -D me -w hush", "zip -P hush a.zip b",
    "KAGGLE_KEY=hush", "ansible_ssh_pass: hush", "https://discord.com/api/v10/webhooks/123/hush", "redis://:p@hush@host",
    # in texts within texts
    '"{\\"token\\": \\"hush\\"}"', "'{\"password\": \"hush\"}'", '+    "api_key": "hush",', "-export HF_TOKEN=hush",
    "+password: hush",
    f"+{PEM}".replace("\n", "\n+"), "KEY = '''-----BEGIN RSA PRIVATE KEY-----\nhushhush\n",
    '"-----BEGIN PRIVATE KEY-----\\nhush\\nhush\\n"',
    PEM, PEM.replace("\n", "\\n"), PEM.partition("\n")[2], PEM.rpartition("\n")[0],
]  # fmt: skip

# by their shape, beside no name
SHAPES = [
    "hf_hushhushhushhush", "sk-abcdefghijklmnop1234", "sk-proj-abcdefghijklmnop1234", "sk-ant-api03-abcdefghijklmnop1234",
    "ghp_abcdefghij0123456789", "github_pat_11ABCDEFG0abcdefg", "glpat-abcdefghij0123456789", "xoxb-123456789012-abcdefgh",
    "xoxp-123456789012-abcdefgh", "AKIAIOSFODNN7EXAMPLE", "ASIAIOSFODNN7EXAMPLE", "AIzaSyA1234567890abcdefghijklmnopqrstu",
    "npm_abcdefghijklmnopqrst0123456789abcdef", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", JWT, LONG, f"{LONG}+/{LONG}==",
    "123456789:AAabcdefghijklmnopqrstuvwxyz0123456", "gsk_abcdefghijklmnop1234", "nvapi-abcdefghijklmnop1234",
    "sk-ant-api03-abcDEF_ghi-jklmnop", "sk-proj-abc-defghijklmnop", "bot123456789:AAabcdefghijklmnopqrstuvwxyz0123456",
    "hvs.CAESIabcdefghijk",
    "SG.abcdefghijklmnop.qrstuvwxyz012345", "pypi-AgEIcHlwaS5vcmcCJabcdef", "sk_live_abcdefghijklmnop",
    "dckr_pat_abcdefghijklmnop",
]  # fmt: skip

STAYS = [
    "tokenizer=bert", "max_tokens=512", "--max-tokens 512", "num_tokens = 5", "n_tokens: 7", "tokens = model(tokens)",
    "pad_token='<pad>'",
    'eos_token: "</s>"', "token_id = 5", "--token-file /run/secrets/token", "token_file = 'x.txt'", "monkey = 'banana'",
    "keyboard: qwerty",
    "key = 'lr'", "sort_key='step'", "cache_key: abc", "primary_key=True", "public_key = 'abc'", "author = 'Ada'",
    "authors: [Ada]",
    "auth: bool = True", "auth=False", "authenticated: yes", "def f(token: str) -> None:",
    "def f(token: str, password: str):", "token = None",
    'token = os.environ["HF_TOKEN"]', "login(token=token)", "login(token=args.token)", "token = get_token()",
    "password = getpass()",
    'getpass("Password: ")', "password=$PASSWORD", "token: ${HF_TOKEN}", 'f"{token}"', 'token = "{token}"', "--token $HF_TOKEN",
    "password: <your password>", 'parser.add_argument("--token", "-t", help="the token")',
    "secretKeyRef: {name: x, key: token}",
    "pass_rate=0.5", "forward_pass = model(x)", "passed: 5", "compass=north", "bypass='x'", "secretary='Ada'",
    "private_key_path=/etc/x.key",
    "ssl_key: /etc/ssl/x.key", "SSH_AUTH_SOCK=/tmp/ssh/agent.1", "PWD=/home/ada", "KeyError: 'token'", "the token is not valid",
    "error: bad token: expected a number", "the password of the user", "token 5 of 100", "tokens/s: 1234",
    "rank 0: token loss 0.5",
    "4aa60ce3f1d2c5b6a7980123456789abcdef0123", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "MIG-8932f937-d72c-4106-c12f-20bd9faed9f6",
    "8932f937-d72c-4106-c12f-20bd9faed9f6", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
    "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", f"sha512-{LONG}==", f"SHA256:{LONG}",
    "20261127-223437-quiet-otter-7", "/work/data/ImageNet2012/Train/Resnet50Baseline/Checkpoints/epoch_12",
    "Meta-Llama-3.1-8B-Instruct-GPTQ-INT4", "torch-2.4.1+cu121-cp311-cp311-linux_x86_64.whl", "_ZN3c104cuda9SetDeviceEi",
    "_ZNSt6vectorIN2at6TensorESaIS1_EE17_M_realloc_insertIJS1_EEEv", "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
    "sm80_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x32", "https://host:8080/a/@scope/pkg", "https://github.com/a/b",
    "git@github.com:a/b",
    "https://ada@host/", "MASTER_ADDR=10.0.0.1", "NCCL_DEBUG=INFO", "--lr 0.5 --batch-size 64", "--key lr",
    "task-abcdefghijklmnopqrstuvwx",
    "hf_transformers", "from transformers import AutoTokenizer", "basic configuration", "bearer of news",
    "-----BEGIN of the log-----",
    "_PyEval_EvalFrameDefault+0x1", 'NAMES = ("HF_TOKEN", "INVOCATION_ID", "MASTER_ADDR")', 'key("a long secret", "job-1")',
    "Qwen3OmniMoeCode2WavRMSNorm", "Wav2Vec2NoLayerNormConvLayer",
    "a genuine `N`-token decode input", "token: str,", "token=token,", "if token == SHOW_CURSOR:", "`token`, `secret`, `other`",
    '"/etc/passwd": text',
    "token: guides/network.md", 'assert "no token: " in (folder / "plan.json").read_text()', 'creds = struct.Struct("iII")',
    "(secret.SCREEN, screen.text, secret.hidden(spec))",
    "/dev/disk/by-id/nvme-Samsung_SSD_980_PRO", "TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
    "DistributedDataParallelKwargs2WithBuffers",
    "error: --auth kerberos is not known", "auth = munge", "bad token: 'foo' at line 3", "SyntaxError: unexpected token: '}'",
    "token = token if token is not None else key", 'class HfToken:\n    """A long docstring."""', "Basic Origin/Host comparisons",
    "f(target, skip_cookie=True, search_ns=False)", "a Matrix of Basic expressions.",
    f"error: /scratch/{LONG}/x.py does not exist", f"logs in ~/runs/{LONG}", f"/data/{LONG}/a.bin: no such file",
    f"--data=/data/{LONG}/a", f"error: nope/{LONG}/x.py does not exist",
    "api_key = cfg.get('api_key') or ask()", "language_token = 'english'", "a, b = 'one', 'two'",
    'parser.add_argument("--token", help="it")\nparser.add_argument("--name", default="bert")',
    'parser.add_argument(\n    "--token",\n    help="it",\n)\nparser.add_argument(\n    "--name",\n    default="bert",\n)',
]  # fmt: skip


@pytest.mark.parametrize("text", HIDES)
def test_a_value_beside_the_name_of_a_secret_is_hidden_whatever_the_syntax(text: str) -> None:
    redactor = Redactor()
    shown = redactor.text(text)
    assert "hush" not in shown
    assert redactor.hidden > 0


@pytest.mark.parametrize("secret", SHAPES)
@pytest.mark.parametrize("form", ["{}", 'x = "{}"', "--name {}", "see {}.", "https://h/{}"])
def test_a_secret_is_known_by_its_shape_where_no_name_stands(secret: str, form: str) -> None:
    assert secret not in Redactor().text(form.format(secret)) or ("://" in form and "/" in secret)  # a path of a server


@pytest.mark.parametrize("text", STAYS)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    redactor = Redactor()
    assert redactor.text(text) == text
    assert redactor.hidden == 0
    assert "(" in text or text.endswith(",") or Redactor().argv(text.split()) == text.split()


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        ("--hf-token hush --lr 1", "--hf-token ... --lr 1"), ("--hf-token=hush", "--hf-token=..."), ("-token hush",
        "-token ..."),
        ("--env HF_TOKEN=hush", "--env HF_TOKEN=..."), ("--env=HF_TOKEN=hush", "--env=HF_TOKEN=..."), ("--token --lr 1",
        "--token --lr 1"),
        ("wandb.api_key=hush", "wandb.api_key=..."), ("++wandb.api_key=hush", "++wandb.api_key=..."),
        ("sshpass -p hush ssh a", "sshpass -p ... ssh a"),
        ("curl -u me:hush x", "curl -u me:... x"), ("docker run --user 1000:1000", "docker run --user 1000:1000"),
        ("mysql -phush", "mysql -p..."), ("serve -p 8080", "serve -p 8080"), ("--url https://a:hush@b",
        "--url https://a:...@b"),
        ("curl -u me:12345 x", "curl -u me:... x"),
    ],
)  # fmt: skip
def test_an_argument_loses_its_value_and_keeps_its_name(argv: str, shown: str) -> None:
    assert Redactor().argv(argv.split()) == shown.split()


@pytest.mark.parametrize(
    "name",
    ["API_KEY", "hf_token", "--token", "--password", "client_secret", "AWS_SECRET_ACCESS_KEY", "auth", "SECRET_KEY_ID"],
)
@pytest.mark.parametrize("number", ["7", "12345", "1234567890", "123456789012345", "12.5", "1e9"])
def test_a_number_beside_the_name_of_a_secret_is_hidden(name: str, number: str) -> None:
    assert Redactor().variable(name, number) == HIDDEN
    assert Redactor().argv([name, f"{name}={number}"]) == [name, f"{name}=..."]
    for form in ("{}={}", "see {}={} there", '"{}": {}', "{}: {}\n"):
        assert Redactor().text(form.format(name, number)) == form.format(name, HIDDEN)
    if name.startswith("--"):
        assert Redactor().argv([name, number]) == [name, HIDDEN]
        assert Redactor().text(f"train.py {name} {number} --lr 1") == f"train.py {name} ... --lr 1"


@pytest.mark.parametrize(
    "name", ["N8N_PASSWORD", "N8N_ENCRYPTION_KEY", "MIN_PASSWORD", "N_SECRET", "PER_USER_SECRET", "TOTAL_ADMIN_SECRET"]
)
@pytest.mark.parametrize("number", ["12345678", "123456789012345"])
def test_a_number_beside_a_password_or_a_key_is_hidden_whatever_else_its_name_says(name: str, number: str) -> None:
    assert Redactor().variable(name, number) == "..."


@pytest.mark.parametrize(
    "name",
    [
        "num_tokens", "max_token", "--max-token", "max_new_token", "maxNewToken", "token_count", "ntoken", "TOKEN_PER_GPU",
        "TOKEN_WINDOW", "JWT_LIFETIME", "WEBHOOK_PORT", "WEBHOOK_TIMEOUT", "JWT_EXPIRE_MINUTES", "MASTER_PORT", "num_api_keys",
        "password_min_length", "token_id", "cost_per_token",
    ],
)  # fmt: skip
@pytest.mark.parametrize("number", ["3", "4096", "12345678901", "0.5"])
def test_a_number_beside_a_name_that_counts_or_measures_stays(name: str, number: str) -> None:
    assert Redactor().variable(name, number) == number
    for words in ([name, number], [f"{name}={number}"]):
        assert Redactor().argv(words) == words
        assert Redactor().text(" ".join(words)) == " ".join(words)


def test_a_variable_is_hidden_by_its_name_and_what_it_holds() -> None:
    variables = {
        "HF_TOKEN": "hush",
        "OMP_NUM_THREADS": "7",
        "URL": "https://a:hush@b",
        "EMPTY_TOKEN": "",
        "PYTHONPATH": "/a:/b",
    }
    redactor = Redactor()
    assert redactor.variables(variables) == {
        "HF_TOKEN": HIDDEN, "OMP_NUM_THREADS": "7", "URL": "https://a:...@b", "EMPTY_TOKEN": "", "PYTHONPATH": "/a:/b",
    }  # fmt: skip
    assert redactor.hidden == 2


def test_a_secret_of_the_environment_is_hidden_wherever_it_stands() -> None:
    known = literals(
        {
            "MY_TOKEN": "plain-words",
            "OTHER": "otherwords",
            "DB_PASSWORD": "short",
            "A_TOKEN": "abc12",
            "MY_SECRET": "training",
            "PAD_TOKEN": "paddings-1",
        }
    )
    assert known == ("plain-words",)
    redactor = Redactor(known)
    assert redactor.text("rank 0 says plain-words and otherwords") == "rank 0 says ... and otherwords"
    assert redactor.argv(["--name", "plain-words"]) == ["--name", "..."]
    assert redactor.data({"a": ["xplain-wordsx", 1, None]}) == {"a": ["x...x", 1, None]}


def test_data_keeps_its_form() -> None:
    content = {
        "v": 1,
        "tokenizers": "0.20",
        "PyJWT": "2.8.0",
        "token": "kept: no variable",
        "list": [True, 1.5, {"x": None}],
    }
    assert Redactor().data(content) == content


@pytest.mark.parametrize(
    "name",
    [
        "TOKEN",
        "HF_TOKEN",
        "hf-token",
        "hfToken",
        "X-Api-Key",
        "AWS_SECRET_ACCESS_KEY",
        "apikey",
        "dbPassword",
        "PGPASSWORD",
        "MYSQL_PWD",
        "client_secret",
        "_authToken",
        "wandb.api_key",
        "NPM_AUTH",
        "OPENAI_API_KEY",
        "GITHUB_PAT",
        "SLACK_WEBHOOK_URL",
        "access_tokens",
        "password2",
        "SMTP_PASS",
        "token_value",
    ],
)
def test_a_name_says_that_it_is_that_of_a_secret(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "max_tokens",
        "token_id",
        "pad_token",
        "num_token",
        "next_token",
        "tokens",
        "monkey",
        "keyboard",
        "key",
        "keys",
        "author",
        "authority",
        "path",
        "passes",
        "secret_name",
        "token_file",
        "password_policy_min",
        "token_type",
        "DDPLAUNCH_TOKEN_FILE",
        "public_key",
        "sort_key",
        "hotkey",
        "turkey",
        "compat",
        "PATH",
    ],
)
def test_a_name_says_that_it_is_none(name: str) -> None:
    assert not is_secret(name)


# --- properties

NO_SECRET = re.compile("oauth2", re.IGNORECASE)  # the name of a way to log in
VALUES = st.text(string.ascii_letters + string.digits, min_size=6, max_size=40).filter(
    lambda value: any(map(str.isdigit, value)) and any(map(str.isalpha, value)) and not NO_SECRET.fullmatch(value)
)
NAMES = st.sampled_from(["HF_TOKEN", "api_key", "password", "clientSecret", "DB_PASSWORD", "x-api-key"])
FORMS = st.sampled_from([
    "{}={}", "{} = '{}'", '{} = "{}"', '"{}": "{}"', "'{}': '{}',", "export {}={}", "--{} {}", "--{}={}", "{}: {}",
    '["{}"] = "{}"',
    "+{}: {}", "-  '{}': '{}'", "ENV {} {}", "f({}='{}')", "x; {}={}", "a.{}={}",
])  # fmt: skip
AROUND = st.text(st.sampled_from("abc xyz 012 .,()\n\n"), max_size=60)


@given(AROUND, NAMES, FORMS, VALUES, AROUND)
def test_whatever_stands_around_it_the_value_is_hidden(
    before: str, name: str, form: str, value: str, after: str
) -> None:
    text = f"{before}\n{form.format(name, value)}\n{after}"
    shown = Redactor().text(text)
    assert value not in shown or value in f"{before}\n{after}" or value in name
    assert Redactor().text(f"{before}\n") in (shown[: len(before) + 1], Redactor().text(before) + "\n")


@given(st.text(), st.sampled_from(Syntax))
def test_any_text_is_taken(text: str, syntax: Syntax) -> None:
    redactor = Redactor()
    shown = redactor.text(text, syntax)
    assert (shown == text) == (redactor.hidden == 0)


@given(st.lists(st.text()))
def test_a_command_line_keeps_its_number_of_words(words: list[str]) -> None:
    assert len(Redactor().argv(words)) == len(words)


def test_bytes_that_are_no_utf_8_stay() -> None:
    assert Redactor().text("a\udcff token='hush\udcff' b\udcfe") == "a\udcff token='...' b\udcfe"


PIECES = [
    "a", "Ab1", "token", "token=", "token='", 'token="', "token: ", "password\\", "://a:", "://a:b@", "key key ",
    "-----BEGIN A KEY-----",
    "-----END A KEY-----\n", "-----BEGIN A KEY-----\n", "token(", 'token = ("a"\n', "token: |\n ", "?key=&", "eyJ", "sk-",
    "bearer ", "=", "/",
    '"', "'", "\\", "token, ", "'token', ", "password value", "machine ", "password password ", "ghp_", "token: a.",
    "token: a[", " ", "\n",
    "token:\n", "x_", "-", "token = a + ", "'token', 'a' default ", "token=f(", "token = f('", "token: a|b", "\t", "+\n",
    "token: '\\", "<token>",
    "mysql ", "curl -u a:", "echo a | ", "docker login ", "login(", "wandb login ", "a or 'b' ", "<a token",
    "--token ", "hf_", "\n ", "token = 'a' ", "A: ", "#",
]  # fmt: skip


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("first", ["", "token", 'token = "', "token = ("])
def test_the_time_for_one_long_line_grows_no_faster_than_its_length(first: str, piece: str) -> None:
    """One that is 8 times as long takes 64 times as long if it does; a core that is shared is slower for a while."""

    def took(size: int) -> float:
        text, began = first + piece * (size // len(piece)), time.process_time()
        Redactor(("known-secret",)).text(text)
        return time.process_time() - began

    assert min(took(1 << 15), took(1 << 15)) < 0.1 + 24 * took(1 << 12)


def test_a_megabyte_in_one_line_takes_a_second_or_two() -> None:
    text = "".join(PIECES[at % len(PIECES)] for at in range(1 << 18)).replace("\n", " ")[: 1 << 20]
    began = time.process_time()
    Redactor().text(text)
    assert time.process_time() - began < 10
