"""The address of a peer, HOST:PORT."""

from typing import NamedTuple

from peerage.errors import InputError


class Address(NamedTuple):
    """The name or IP address of a machine, without brackets, and a port.

    >>> Address.parse("[2001:db8::7]:7400")
    Address(host='2001:db8::7', port=7400)
    >>> str(Address("2001:db8::7", 7400)), str(Address("localhost", 7400))
    ('[2001:db8::7]:7400', 'localhost:7400')
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str, of: str = "", *, lowest: int = 1) -> "Address":
        """Parse HOST:PORT; `of` names the owner in errors, and port 0 stands for any free port."""
        host, _, port = text.rpartition(":")
        if not is_host(host) or not _is_number(port) or not lowest <= int(port) < 65536:
            owner = f" of {of}" if of else ""
            raise InputError(f"address {text!r}{owner} is not HOST:PORT, such as 10.0.0.3:7400")
        return cls(host.removeprefix("[").removesuffix("]"), int(port))


def is_host(text: str) -> bool:
    """Whether this is a valid host name or address; one with colons must be in brackets."""
    bare = text.removeprefix("[").removesuffix("]")
    if (":" in bare) != (text == f"[{bare}]"):
        return False
    try:
        return bool(bare.encode("idna"))
    except UnicodeError:  # such as a label that is empty or too long
        return False


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()
