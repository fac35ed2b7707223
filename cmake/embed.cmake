# Writes the bytes of IN to OUT as the array NAME with its size NAME_bytes, as HEADER declares them. Run as a script by the build.
file(READ ${IN} bytes HEX)
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," bytes "${bytes}")
string(REGEX REPLACE "(0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,)" "\\1\n" bytes "${bytes}")
file(WRITE ${OUT} "#include \"${HEADER}\"\n\nconst unsigned char ${NAME}[] = {\n"
                  "${bytes}};\nconst size_t ${NAME}_bytes = sizeof ${NAME};\n")
