"""Sums JUnit files: prints "PASSED FAILED". Skipped tests count as neither. Called by scripts/test."""

import sys
import xml.etree.ElementTree as ElementTree


def main(paths):
    passed = failed = 0
    for path in paths:
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            if case.find("skipped") is not None or case.get("status") in ("notrun", "disabled"):
                continue
            if case.find("failure") is not None or case.find("error") is not None:
                failed += 1
            elif case.get("status") == "fail":
                failed += 1
            else:
                passed += 1
    print(passed, failed)


if __name__ == "__main__":
    main(sys.argv[1:])
