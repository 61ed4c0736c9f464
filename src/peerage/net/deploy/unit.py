"""The systemd unit of one peer, and the file with the options of its site."""

from pathlib import PurePosixPath

# The folder of a peer, as the unit names it. A fixed path needs no quoting.
STATE = PurePosixPath("/var/lib/peerage")
USER = "peerage"
OPTIONS = "PEERAGE_NODE_OPTIONS"
FIRST_UNPRIVILEGED_PORT = 1024

SITE = f"""\
# Options of this site, which systemd adds to `peerage node`; remove the # to set them. Paths are
# relative to this folder. After a change: sudo systemctl restart {{unit}}
# {OPTIONS}=--data npz:path=data/mine.npz --metrics-port 9100
"""

UNIT = f"""\
# One peer of a network. README.txt says how to install this file. It need not be edited: options of
# this site belong in site.env.
[Unit]
Description=Peerage peer {{name}}
Wants=network-online.target
After=network-online.target
# Give up after 20 failures in 10 minutes.
StartLimitIntervalSec=600
StartLimitBurst=20

[Service]
# The user must exist, and own the folder {{home}}.
User={USER}
StateDirectory={{state}}
StateDirectoryMode=0700
WorkingDirectory={{home}}
Environment=PEERAGE_DATA={{home}}/data
EnvironmentFile=-{{home}}/site.env
ExecStart={{home}}/{{command}} ${OPTIONS}
# Wait 10 seconds before the first restart, and up to 5 minutes before later ones. Versions of
# systemd before 254 ignore the last two lines, and always wait 10 seconds.
Restart=on-failure
RestartSec=10
RestartSteps=5
RestartMaxDelaySec=300
# Wrong input, a model that diverged or a full disk: another start would end the same way.
RestartPreventExitStatus=2
# The exit status after SIGTERM, which is not a failure.
SuccessExitStatus=130
# The peer finishes its current computation before it stops. After this time it is killed, which is
# safe: it continues from its last round.
TimeoutStopSec=30
# Every connection is an open file.
LimitNOFILE=65536

# The peer may read public files, write to its own folder, and use the network.
CapabilityBoundingSet={{capabilities}}
AmbientCapabilities={{capabilities}}
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectHostname=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
RestrictNamespaces=yes
RestrictSUIDSGID=yes
RestrictRealtime=yes
LockPersonality=yes
RemoveIPC=yes
KeyringMode=private
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged
SystemCallErrorNumber=EPERM
UMask=0077
# Not set: MemoryDenyWriteExecute, as PyTorch generates machine code, and ProcSubset, as it reads
# /proc/cpuinfo.

[Install]
WantedBy=multi-user.target
"""


def home_of(name: str) -> str:
    """The folder in which systemd runs a peer."""
    return str(STATE / name)


def unit_name(name: str) -> str:
    return f"peerage-{name}.service"


def unit_files(name: str, command: str, port: int) -> dict[str, str]:
    """The unit of a peer that this command starts, and the file with the options of its site."""
    words = {
        "name": name,
        "unit": unit_name(name),
        "home": home_of(name),
        "state": f"{STATE.name}/{name}",
        "command": command,
        "capabilities": "CAP_NET_BIND_SERVICE" if port < FIRST_UNPRIVILEGED_PORT else "",
    }
    return {unit_name(name): UNIT.format(**words), "site.env": SITE.format(**words)}
