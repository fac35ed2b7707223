# Instruction sets by file name. Everything else is compiled for the baseline, and with contraction off: the reference must give
# the same bits with every compiler.

set(nibble_avx2_flags -mavx2 -mfma -mf16c -mbmi -mbmi2)
set(nibble_avx512_flags ${nibble_avx2_flags} -mavx512f -mavx512bw -mavx512vl -mavx512dq
    -mavx512vbmi -mavx512vnni -mavx512bf16)
set(nibble_amx_flags ${nibble_avx512_flags} -mamx-tile -mamx-bf16 -mamx-int8)

# Sets the flags of the sources in the list `var`; takes kernel files out where they cannot be compiled.
function(nibble_kernel_sources var)
    set(sources ${${var}})
    foreach(source ${${var}})
        if(source MATCHES "_(avx2|avx512|amx)\\.c$")
            set(level ${CMAKE_MATCH_1})
            if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
                set_source_files_properties(${source} PROPERTIES
                                            COMPILE_OPTIONS "${nibble_${level}_flags}")
            else()
                list(REMOVE_ITEM sources ${source})
            endif()
        else()
            set_source_files_properties(${source} PROPERTIES COMPILE_OPTIONS -ffp-contract=off)
        endif()
    endforeach()
    set(${var} ${sources} PARENT_SCOPE)
endfunction()
