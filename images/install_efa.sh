#!/bin/bash
# Inside a container, as root: the user-space half of AWS's EFA, and the plugin that NCCL reaches it by. The kernel
# module is the node's own. build_efa.sh runs it in an enroot container, efa.Dockerfile in a build.
#
#   bash install_efa.sh EFA_INSTALLER AWS_OFI_NCCL    versions, like 1.49.0 and v1.19.2
#
# Writes /opt/amazon/moekit-efa.json: what it put in, and the image's NCCL and CUDA.
set -euo pipefail

# The number behind `#define NAME` in the image's nccl.h.
of_nccl() {
    sed -n "s/^#define $1  *\([0-9]*\).*/\1/p" "$2"
}

main() {
    local efa=$1 ofi=$2 work header nccl libfabric missing
    [[ $efa =~ ^[0-9.]+$ && $ofi =~ ^v[0-9.]+(-aws)?$ ]] || {
        echo "install_efa.sh: no versions: $efa, $ofi" >&2
        exit 1
    }
    work=$(mktemp -d)
    cd "$work"
    export DEBIAN_FRONTEND=noninteractive

    curl -fsSL --retry 3 -o efa.tar.gz "https://efa-installer.amazonaws.com/aws-efa-installer-$efa.tar.gz"
    tar -xf efa.tar.gz
    (cd aws-efa-installer && ./efa_installer.sh -y --skip-kmod --skip-limit-conf --no-verify)

    apt-get update
    apt-get install -y --no-install-recommends libhwloc-dev
    curl -fsSL --retry 3 -o ofi.tar.gz \
        "https://github.com/aws/aws-ofi-nccl/releases/download/$ofi/aws-ofi-nccl-${ofi#v}.tar.gz"
    tar -xf ofi.tar.gz
    (
        cd "aws-ofi-nccl-${ofi#v}"
        ./configure --prefix=/opt/amazon/ofi-nccl --with-libfabric=/opt/amazon/efa --with-cuda=/usr/local/cuda \
            --enable-platform-aws --disable-tests
        make -j "$(nproc)"
        make install
    )
    rm -rf "$work" /var/lib/apt/lists/*

    # NCCL looks for this name where NCCL_NET_PLUGIN=ofi, and says no more than `Using network Socket` where a library
    # that it needs is of another version (`EFA_1.4' not found; handbook 2.2).
    export LD_LIBRARY_PATH=/opt/amazon/ofi-nccl/lib:/opt/amazon/efa/lib:${LD_LIBRARY_PATH:-}
    missing=$(ldd /opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so 2>&1 | grep 'not found' || true)
    if [[ -n $missing ]]; then
        printf 'install_efa.sh: the plugin does not find what it needs:\n%s\n' "$missing" >&2
        exit 1
    fi

    header=$(find /usr/include /usr/local/cuda/include -name nccl.h 2>/dev/null | head -n 1)
    nccl=null
    if [[ -n $header ]]; then
        nccl="\"$(of_nccl NCCL_MAJOR "$header").$(of_nccl NCCL_MINOR "$header").$(of_nccl NCCL_PATCH "$header")\""
    fi
    libfabric=$(/opt/amazon/efa/bin/fi_info --version | sed -n 's/^libfabric: //p')
    printf '{\n "efa_installer": "%s",\n "libfabric": "%s",\n "aws_ofi_nccl": "%s",\n "nccl": %s,\n "cuda": "%s"\n}\n' \
        "$efa" "$libfabric" "$ofi" "$nccl" "${CUDA_VERSION:-}" >/opt/amazon/moekit-efa.json
}

# As a function, so that bash has read all of it before anything reads the same standard input.
main "$@"
