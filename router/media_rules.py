"""Rules for URLs of images: allowed hosts, addresses and files (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from urllib.parse import SplitResult

DEFAULT_PORTS = {"http": 80, "https": 443}
Network = IPv4Network | IPv6Network


class Refusal(ValueError):
    """Why an image is not fetched, in words for the client."""


@dataclass(frozen=True)
class MediaRules:
    """Hosts and a directory that images may come from."""

    hosts: frozenset[str]
    """Lower-case names, with ``:port`` where it is not the usual one."""
    networks: tuple[Network, ...]
    """Addresses that are allowed beside public ones."""
    directory: Path | None

    @classmethod
    def of(cls, domains: Sequence[str], directory: str | None) -> MediaRules:
        """Rules from flags: host names, addresses and networks; a directory.

        Raises:
            ValueError: one is a URL or empty, or the directory is none.
        """
        hosts, networks = set[str](), list[Network]()
        for domain in domains:
            name = domain.strip().lower().rstrip(".")
            try:
                networks.append(ip_network(name, strict=False))
            except ValueError:
                if not name or "/" in name or "@" in name:
                    raise ValueError(
                        f"--allowed-media-domains {domain!r}: give names of hosts, like images.example.com"
                    ) from None
            hosts.add(name)
        if directory is not None and not Path(directory).is_dir():
            raise ValueError(f"--allowed-local-media-path {directory}: there is no such directory")
        return cls(
            frozenset(hosts), tuple(networks), None if directory is None else Path(directory).resolve()
        )

    def check(self, parts: SplitResult) -> None:
        """Check a URL before anything is looked up.

        Raises:
            Refusal: it is not allowed.
        """
        if parts.scheme == "file":
            if self.directory is None:
                raise Refusal("is a file URL: they need --allowed-local-media-path. Send it as a data URL")
            if parts.netloc not in ("", "localhost"):
                raise Refusal("is a file URL of another host")
            return
        if parts.scheme not in DEFAULT_PORTS:
            raise Refusal(f"has the scheme {parts.scheme[:20]!r}: images come by http, https and data URLs")
        if not self.hosts:
            raise Refusal(
                f"is a {parts.scheme} URL: images are not fetched without --allowed-media-domains. Send it "
                f"as a data URL in base64"
            )
        if parts.username is not None or parts.password is not None:
            raise Refusal("has a user's name in its URL")
        host = (parts.hostname or "").rstrip(".")
        usual = parts.port in (None, DEFAULT_PORTS[parts.scheme])
        if f"{host}:{parts.port}" not in self.hosts and not (usual and host in self.hosts):
            raise Refusal("is at a host that --allowed-media-domains does not name")

    def check_addresses(self, addresses: Sequence[str]) -> None:
        """Check the addresses of a host, all of them.

        Raises:
            Refusal: one is of a private network, this host, a link or a group, and is not allowed.
        """
        for text in addresses:
            address = ip_address(text.partition("%")[0])
            if getattr(address, "ipv4_mapped", None) is not None:
                address = address.ipv4_mapped  # type: ignore[union-attr,assignment]
            is_public = address.is_global and not address.is_multicast
            if not is_public and not any(address in network for network in self.networks):
                raise Refusal("is at an address that is not public")

    def allows_file(self, path: Path) -> bool:
        """Whether a file, links followed, is below the directory."""
        return self.directory is not None and path.is_relative_to(self.directory)
