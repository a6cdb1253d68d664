"""The English around a number: words that leave it what it is, words that change it, scales and units."""


def _words(*lists: str) -> frozenset[str]:
    return frozenset(word for text in lists for word in text.split())


# Before a number these leave it what it is. Any other, such as "twice", "not", "over" or "May", may change it.
COMMON = _words(
    "a an the i he she it we you they his her its our your my their this that there",
    "is are was were be been has have had do does did will now still so then thus hence therefore finally",
    "answer answers final result value total equal equals about approximately exactly altogether with in of",
    "get gets got give gives gave given make makes made take takes took need needs earn earns earned",
    "cost costs pay pays paid spend spends spent",
)

SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
SCALES |= {"lakh": 10**5, "lakhs": 10**5, "crore": 10**7, "crores": 10**7, "dozen": 12}

# Behind a number these say more than a unit.
NO_UNITS = frozenset(SCALES) | _words(
    # a time or a date
    "am pm oclock noon midnight monday tuesday wednesday thursday friday saturday sunday",
    "january february march april may june july august september october november december",
    "jan feb mar apr jun jul aug sep sept oct nov dec st nd rd th",
    # another value
    "plus minus times squared cubed factorial power root sqrt pi tau bn mn mil score",
    "hundreds thousands millions billions trillions dozens half halves third thirds quarter quarters fourth fourths",
    "fifth fifths sixth sixths seventh sevenths eighth eighths ninth ninths tenth tenths twelfth twelfths",
    "twentieth twentieths hundredth hundredths thousandth thousandths millionth millionths",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen",
    "eighteen nineteen twenty thirty forty fifty sixty seventy eighty ninety",
    # a bound, a choice, or taken back
    "more less fewer most least over under than except or and nor but not no is are was maybe perhaps wrong",
)

# All units of one letter, which must stand apart, and those of two or three that may touch their number: "5h", "5 K"
# and "5ab" may be something else.
SHORT_UNITS = _words(
    "m s g h l L V W N J A C F cm mm km nm kg mg Mg ml mL cl dl mi yd ft in lb lbs oz hr hrs min sec ms mph kph kmh",
    "ha cc gal pt qt Hz kHz MHz kW MW mW kWh kJ MJ mA mV kV eV Pa kPa MB GB KB TB kB px",
)

# Several spellings of one unit; a final s is taken off before.
UNITS = {
    "$": "dollar", "us$": "dollar", "usd": "dollar", "€": "euro", "eur": "euro", "£": "pound", "gbp": "pound",
    "¥": "yen", "₹": "rupee", "percent": "%", "pct": "%", "percentage": "%", "degree": "°", "deg": "°", "per": "/",
    "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm", "meter": "m", "metre": "m",
    "kilometer": "km", "kilometre": "km", "gram": "g", "kilogram": "kg", "milligram": "mg", "liter": "l", "litre": "l",
    "milliliter": "ml", "millilitre": "ml", "second": "s", "sec": "s", "minute": "min", "hour": "h", "hr": "h",
    "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "ounce": "oz", "lbs": "lb",
    "hrs": "h", "celsius": "C", "fahrenheit": "F", "mph": "mi / h", "kph": "km / h", "kmh": "km / h",
}  # fmt: skip

# Words that belong to no unit: 5 apples in total are 5 apples.
IDLE = _words("a an the of in total altogether")
POWERS = {"square": "2", "sq": "2", "cubic": "3", "cu": "3"}
