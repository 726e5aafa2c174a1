#!/bin/bash
# What import.sh and build_efa.sh share: an image gets its name once it is whole, and only one process makes it.

fail() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# Take the image OUT for this process. PART is where it is made, beside OUT and of another name; what an earlier process
# left there is removed.
claim() {
    local folder
    [[ $1 == *.sqsh ]] || fail "an image's name ends in .sqsh: $1"
    folder=$(cd "$(dirname "$1")" && pwd) || fail "there is no folder $(dirname "$1")"
    OUT=$folder/$(basename "$1")
    PART=$folder/.$(basename "$1" .sqsh).part.sqsh
    # enroot gets the lock too: where it outlives this shell, nobody else writes the same file
    exec {MOEKIT_LOCK}>"$folder/.$(basename "$1").lock"
    local taken=0
    flock --nonblock "$MOEKIT_LOCK" || taken=$?
    ((taken != 1)) || fail "another process is making $OUT"
    [[ ! -e $OUT ]] || fail "there is an image already: $OUT"
    rm -f "$PART"
}

# Whether a file is a whole squashfs: its magic, and as many bytes as its superblock says. A cut-off export has fewer.
is_whole() {
    local magic used size
    [[ -f $1 ]] || return 1
    magic=$(head -c 4 "$1")
    used=$(od -An -t u8 -j 40 -N 8 "$1")
    size=$(stat -c %s "$1")
    [[ $magic == hsqs ]] && ((used > 96 && used <= size))
}

# TEXT as a JSON string.
json() {
    local text=${1//\\/\\\\}
    printf '"%s"' "${text//\"/\\\"}"
}

# Give PART its name: what it is first, `OUT.json`, then the image itself. The arguments are further lines of that file,
# each `"name": value`.
publish() {
    is_whole "$PART" || fail "the image is cut off, and gets no name: $PART"
    local record=$OUT.json line
    {
        printf '{\n "image": %s,\n' "$(json "$(basename "$OUT")")"
        for line in "$@"; do
            printf ' %s,\n' "$line"
        done
        printf ' "made": "%s",\n "bytes": %s,\n "sha256": "%s"\n}\n' \
            "$(date -u +%Y-%m-%dT%H:%M:%SZ)" "$(stat -c %s "$PART")" "$(sha256sum <"$PART" | cut -d ' ' -f 1)"
    } >"$record.part"
    mv "$record.part" "$record"
    mv --no-clobber "$PART" "$OUT"
    [[ ! -e $PART ]] || fail "there is an image already: $OUT"
    rm -f "$(dirname "$OUT")/.$(basename "$OUT").lock"
    echo "$OUT"
}
