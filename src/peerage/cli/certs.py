"""The commands about certificates of real peers: certs init, add, request, sign, rotate and so on.

Slow imports are inside functions, so that `peerage --help` starts fast.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option, Typer

from peerage.cli.flags import Json
from peerage.errors import InputError

if TYPE_CHECKING:
    from peerage.net.trust.certs import Authority, Issued

certs_app = Typer(
    help="Create, sign, list and revoke certificates of real peers.", no_args_is_help=True
)

FOLDER = Path("certs")
Folder = Annotated[Path, Option(help="Folder of the certificate authority.")]
Hosts = Annotated[str, Option(help="Host names or addresses of the peers, separated by commas.")]
Days = Annotated[int, Option(help="Days until the certificates expire.")]
Observer = Annotated[bool, Option("--observer", help="Allow only to ask peers for their status.")]


@certs_app.command()
def init(
    folder: Folder = FOLDER,
    name: Annotated[str, Option(help="Name of the certificate authority.")] = "peerage",
    years: Annotated[int, Option(help="Years until its certificate expires.")] = 10,
    as_json: Json = False,
) -> None:
    """Create a certificate authority; peers trust whatever it signs."""
    facts = _authority_facts(_import_authority().create(folder, name, years))
    if as_json:
        print(json.dumps(facts))
        return
    print(f"authority {name!r} is ready in {folder}, valid until {facts['until'][:10]}")
    print(f"keep {folder / 'authority.key'} secret: anyone who has it can create identities")


@certs_app.command()
def add(
    names: Annotated[list[str], Argument(help="Identities to create, e.g. node-0 node-1.")],
    folder: Folder = FOLDER,
    hosts: Hosts = "localhost,127.0.0.1",
    days: Days = 825,
    observer: Observer = False,
    as_json: Json = False,
) -> None:
    """Create identities: a key and a certificate for each peer, or for an observer."""
    machines = _split(hosts)
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InputError(f"identity {repeated[0]!r} is given twice; name each once")
    authority = _import_authority().load(folder)
    for name in names:  # before any is created
        authority.check_free(name)
    made = [authority.issue(name, hosts=machines, days=days, observer=observer) for name in names]
    if as_json:
        files = [{key: str(value) for key, value in vars(one).items()} for one in made]
        print(json.dumps({"identities": files}))
        return
    for identity in made:
        print(f"{identity.name} is ready: {identity.certificate} and its key {identity.key}")
    needs = "an observer" if observer else "a peer"
    print(f"{needs} also needs {made[0].authority} and {made[0].revoked}")


@certs_app.command()
def request(
    name: Annotated[str, Argument(help="Identity to request a certificate for, e.g. node-1.")],
    folder: Annotated[Path, Option(help="Folder of the peer, which gets its key.")] = FOLDER,
    hosts: Hosts = "localhost,127.0.0.1",
    as_json: Json = False,
) -> None:
    """Create a key, which stays here, and a request for a certificate to send to the authority.

    An existing key is used again, to renew its certificate.
    """
    _import_authority()
    from peerage.net.trust.csr import create_request

    path, made = create_request(folder, name, _split(hosts))
    if as_json:
        print(json.dumps({"name": name, "request": str(path), "fingerprint": made.fingerprint}))
        return
    print(f"send {path} to the authority, which signs it with `peerage certs sign {path.name}`")
    print(f"put the certificate that it returns into {folder}; the key {name}.key stays there")
    print(f"fingerprint of the key, to compare: {made.fingerprint}")


@certs_app.command()
def sign(
    file: Annotated[Path, Argument(help="Request of a peer, e.g. node-1.csr.")],
    folder: Folder = FOLDER,
    days: Days = 825,
    observer: Observer = False,
    as_json: Json = False,
) -> None:
    """Sign a request for a certificate; the name of the file must be that of the peer."""
    authority = _import_authority().load(folder)
    from peerage.net.trust.csr import SigningRequest

    wanted = SigningRequest.load(file)
    path = authority.sign(wanted, days=days, observer=observer)
    if as_json:
        facts = {"name": wanted.name, "certificate": str(path), "hosts": list(wanted.hosts)}
        print(json.dumps({**facts, "fingerprint": wanted.fingerprint}))
        return
    print(f"send {path} back to {wanted.name} ({', '.join(wanted.hosts)})")
    print(f"fingerprint of its key, to compare: {wanted.fingerprint}")


@certs_app.command("sign-network")
def sign_network_file(
    network: Annotated[Path, Argument(help="Network file, e.g. network.toml.")],
    folder: Folder = FOLDER,
    as_json: Json = False,
) -> None:
    """Sign a network file and its experiment, for instance after an edit."""
    authority = _import_authority().load(folder)
    from peerage.net.trust.signature import sign_network

    path = sign_network(authority, network)
    if as_json:
        print(json.dumps({"network": str(network), "signature": str(path)}))
    else:
        print(f"signed; give {network}, its experiment and {path} to every peer")


@certs_app.command("list")
def list_identities(folder: Folder = FOLDER, as_json: Json = False) -> None:
    """List identities with their state and expiry date."""
    authority = _import_authority().load(folder)
    facts = _authority_facts(authority)
    rows = [_facts(one) for one in authority.issued()]
    if as_json:
        print(json.dumps({"authority": facts, "identities": rows}))
        return
    print(f"authority {authority.name!r} in {folder}, valid until {facts['until'][:10]}")
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        print(
            f"{row['name']:{width}}  {row['status']:7}  until {row['until'][:10]}  "
            f"{row['serial']}  {', '.join(row['hosts'])}{'  observer' * row['observer']}"
        )


@certs_app.command()
def revoke(
    name: Annotated[
        str, Argument(help="Identity, or serial number that `peerage certs list` shows.")
    ],
    folder: Folder = FOLDER,
    as_json: Json = False,
) -> None:
    """Revoke an identity; peers that have the new list reject it."""
    new = [f"{serial:x}" for serial in _import_authority().load(folder).revoke(name)]
    path = folder / "revoked.pem"
    if as_json:
        print(json.dumps({"name": name, "revoked": new, "list": str(path)}))
    elif new:
        print(f"revoked {name} (serial {', '.join(new)}); give {path} to every peer")
    else:
        print(f"{name} was already revoked; {path} is unchanged")


@certs_app.command()
def rotate(
    folder: Folder = FOLDER,
    name: Annotated[
        str, Option(help="Name of the new authority (default: the old one with a number).")
    ] = "",
    years: Annotated[int, Option(help="Years until its certificate expires.")] = 10,
    days: Days = 825,
    finish: Annotated[
        bool, Option("--finish", help="Trust only the new authority, when all peers use it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Replace the authority while peers run: both are valid until --finish.

    The new authority certifies the keys of all valid identities again.
    """
    _import_authority()
    from peerage.net.trust import rotation

    if finish:
        facts = _authority_facts(rotation.finish(folder))
        text = f"trusting {facts['name']!r} only; give authority.pem and revoked.pem of {folder} "
        print(json.dumps(facts) if as_json else f"{text}to every peer")
        return
    made = rotation.rotate(folder, name, years=years, days=days)
    facts = _authority_facts(made.authority)
    if as_json:
        print(json.dumps({**facts, "certificates": [str(path) for path in made.certificates]}))
        return
    print(f"authority {facts['name']!r} is ready in {folder}; both are valid now")
    print("1. give authority.pem and revoked.pem to every peer, which uses them without a restart")
    print(f"2. then give each peer its new certificate: {', '.join(map(str, made.certificates))}")
    print(f"3. then run `peerage certs rotate --finish --folder {folder}`, and repeat step 1")
    print("network files must be signed again, before step 3: `peerage certs sign-network`")


def _split(hosts: str) -> list[str]:
    machines = [host.strip() for host in hosts.split(",") if host.strip()]
    if not machines:
        raise InputError(f"--hosts {hosts!r} names no host; write --hosts localhost,127.0.0.1")
    return machines


def _import_authority() -> "type[Authority]":
    """The class of certificate authorities, which needs an optional package."""
    try:
        import cryptography.x509  # noqa: F401 (only to see whether it is installed)
    except ImportError:
        raise InputError(
            'certificates need the package cryptography; pip install "peerage[net]"'
        ) from None
    from peerage.net.trust.certs import Authority

    return Authority


def _authority_facts(authority: "Authority") -> dict[str, Any]:
    return {
        "name": authority.name,
        "folder": str(authority.folder),
        "until": authority.certificate.not_valid_after_utc.isoformat(),
    }


def _facts(issued: "Issued") -> dict[str, Any]:
    return {
        "name": issued.name,
        "status": issued.status,
        "serial": f"{issued.serial:x}",  # too long for a number in JSON
        "from": issued.not_before.isoformat(),
        "until": issued.not_after.isoformat(),
        "revoked": None if issued.revoked is None else issued.revoked.isoformat(),
        "hosts": list(issued.hosts),
        "observer": issued.observer,
    }
