#compdef %(prog_name)s

# click's script has `_describe` list what it is given, which moves words with equal descriptions together: of runs, the newest
# was not the first then. This one lists each word on a line of its own, in the order of the answer.
%(complete_func)s() {
    local -a response words_alone words_described descriptions lines
    local type key description
    integer width=0 index
    (( $+commands[%(prog_name)s] )) || return 1

    response=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) %(complete_var)s=zsh_complete %(prog_name)s)}")
    for type key description in ${response}; do
        if [[ $type == dir ]]; then
            _path_files -/
        elif [[ $type == file ]]; then
            _path_files -f
        elif [[ $description == _ ]]; then
            words_alone+=("$key")
        else
            words_described+=("$key")
            descriptions+=("$description")
            (( width = $#key > width ? $#key : width ))
        fi
    done
    for (( index = 1; index <= $#words_described; index++ )); do
        lines+=("${${:-${(r:width:)words_described[index]}  -- $descriptions[index]}[1,COLUMNS-1]}")
    done
    if (( $#words_described )); then
        compadd -U -l -V unsorted -d lines -a words_described
    fi
    if (( $#words_alone )); then
        compadd -U -V unsorted -a words_alone
    fi
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
